"""An ASTRA-sim NPU: its clock, its messages, its queues of chunks, and the phases over dimensions
that a collective becomes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from interlace.errors import ConfigError
from interlace.units import ceil_div
from interlace_sim.astra.algorithms import (
    LOCAL_DELAY_NS,
    Direct,
    HalvingDoubling,
    Part,
    Ring,
    Tree,
    binary_tree,
)
from interlace_sim.astra.config import System
from interlace_sim.astra.network import AwareNetwork, UnawareNetwork
from interlace_sim.engine import Engine

Tag = tuple[int, int]
"""Communicator group and number of a chunk; messages match by it."""

Algorithm = Ring | Direct | HalvingDoubling | Tree


def split(kind: str, size: int, splits: int, npus: int) -> tuple[int, int]:
    """Return the bytes of a collective's chunks, and their number; 0 bytes if there are too few.

    Args:
        kind: Kind of the collective.
        size: Bytes of an NPU's buffer; of its shard for an all-gather.
        splits: ``preferred-dataset-splits``.
        npus: Number of the network's NPUs.
    """
    chunk = size // splits
    # ASTRA-sim's smallest chunk has a byte for every NPU.
    if kind != "all_gather" and npus > chunk:
        chunk, size = npus, splits * npus
    # A remainder is one chunk more, of full size.
    return chunk, ceil_div(size, chunk) if chunk else 0


def logical_axes(algorithms: Sequence[str], shape: Sequence[int]) -> list[tuple[int, int]]:
    """List members and stride of every logical dimension.

    An algorithm named ``one...`` takes all NPUs as one dimension. Dimensions for which no
    algorithm is named take no part.
    """
    axes: list[tuple[int, int]] = []
    stride = 1
    for name, count in zip(algorithms, shape, strict=False):
        if name.startswith("one"):
            return [*axes, (math.prod(shape), 1)]
        axes.append((count, stride))
        stride *= count
    return axes


class Mailbox:
    """A matcher of sends and receives by tag, sender, receiver and size, in order."""

    def __init__(self, engine: Engine, network: AwareNetwork | UnawareNetwork) -> None:
        self.engine, self.network = engine, network
        self._arrived: dict[tuple[Tag, int, int, int], int] = {}
        self._waiting: dict[tuple[Tag, int, int, int], list[Callable[[], None]]] = {}

    def send(
        self,
        tag: Tag,
        source: int,
        destination: int,
        size: int,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Start a message, and call ``sent()`` when it has arrived."""
        key = (tag, source, destination, size)
        assert size > 0, "an algorithm makes no empty message"
        assert source != destination, "nor one to its sender"
        self.network.send(source, destination, size, lambda: self._arrive(key, sent))

    def receive(
        self, tag: Tag, source: int, destination: int, size: int, received: Callable[[], None]
    ) -> None:
        """Call ``received()`` when the next such message has arrived.

        If it has arrived already, the call is the clock's next event of this instant.
        """
        key = (tag, source, destination, size)
        if self._arrived.get(key):
            self._arrived[key] -= 1
            self.engine.after(0, received)
        else:
            self._waiting.setdefault(key, []).append(received)

    def _arrive(self, key: tuple[Tag, int, int, int], sent: Callable[[], None] | None) -> None:
        if sent is not None:
            sent()
        waiting = self._waiting.get(key)
        # Receives of equal key are served first come, first served, as are the messages.
        if waiting:
            waiting.pop(0)()
        else:
            self._arrived[key] = self._arrived.get(key, 0) + 1


@dataclasses.dataclass(slots=True)
class Phase:
    """A collective in one dimension, which becomes an algorithm when its turn comes."""

    dimension: int
    build: Callable[[Stream], Algorithm]


@dataclasses.dataclass(slots=True, eq=False)
class Stream:
    """One chunk of a collective on one NPU."""

    tag: Tag
    phases: list[Phase]
    priority: int
    done: Callable[[], None]
    algorithm: Algorithm | None = None
    dimension: int = -1
    running: bool = False


class Npu:
    """An NPU's system layer."""

    def __init__(
        self, npu: int, engine: Engine, mailbox: Mailbox, system: System, shape: tuple[int, ...]
    ) -> None:
        self.id, self.engine, self.mailbox, self.system, self.shape = (
            npu,
            engine,
            mailbox,
            system,
            shape,
        )
        self._calls: dict[int, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        self._queues: dict[int, list[Stream]] = {}
        self._running: dict[int, int] = {}
        self._priority = 0
        self._numbers: dict[int, int] = {}
        self._trees: dict[tuple[int, str], int] = {}
        self._reduce_bytes_per_ns = system.local_mem_bw

    # The methods from here on are the clock and the messages that algorithms use.

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` in ``delay_ns``, with this NPU's other calls of that instant.

        ASTRA-sim runs all calls of an NPU for one instant when the first of them is due, and ties
        between NPUs depend on that.
        """
        time = self.engine.now + delay_ns
        calls = self._calls.get(time)
        if calls is None:
            calls = self._calls[time] = []
            self.engine.at(time, self._call, time)
        calls.append((call, args))

    def _call(self, time: int) -> None:
        calls = self._calls[time]
        # The list may grow while it runs: a call may schedule another one for this instant.
        for call, args in calls:
            call(*args)
        del self._calls[time]

    def through_endpoint(
        self, delay_ns: int, reduced_bytes: int, passed: Callable[[], None]
    ) -> None:
        """Pass the endpoint, and reduce ``reduced_bytes``: read two operands, write one."""
        if reduced_bytes:
            passes = 3 * int(reduced_bytes / self._reduce_bytes_per_ns)
            self.after(delay_ns, lambda: self.after(passes, passed))
        else:
            self.after(delay_ns, passed)

    def send(self, destination: int, tag: Tag, size: int) -> None:
        self.mailbox.send(tag, self.id, destination, size)

    def receive(self, source: int, tag: Tag, size: int, received: Callable[[], None]) -> None:
        self.mailbox.receive(tag, source, self.id, size, received)

    # The methods from here on turn a collective into streams of phases.

    def collective(
        self,
        kind: str,
        size: int,
        dims: Sequence[bool] | None,
        group: tuple[int, list[int]] | None,
        priority: int,
        done: Callable[[], None],
    ) -> None:
        """Start a collective of ``size`` bytes, and call ``done()`` when this NPU's part is over.

        Args:
            kind: ``"all_reduce"``, ``"all_to_all"``, ``"all_gather"`` or ``"reduce_scatter"``.
            size: Bytes of this NPU's buffer; for an all-gather, bytes of its shard.
            dims: For each dimension, whether it takes part; None is all.
            group: Id and members of a communicator group; None is all NPUs.
            priority: Priority for the ``EXPLICIT`` policy; the largest goes first.
            done: Function without arguments.
        """
        chunk, chunks = split(
            kind, size, self.system.preferred_dataset_splits, math.prod(self.shape)
        )
        if chunk == 0:
            raise ConfigError(
                f"a collective's bytes must be at least preferred-dataset-splits; got {size} bytes "
                f"and {self.system.preferred_dataset_splits} splits. Change one of them."
            )
        if self.system.scheduling_policy == "LIFO":
            priority, self._priority = self._priority, self._priority + 1
        # FIFO lets earlier collectives go first: their priority is larger. LIFO is the reverse.
        elif self.system.scheduling_policy == "FIFO":
            priority, self._priority = self._priority, self._priority - 1
        left = [chunks]

        def one_done() -> None:
            left[0] -= 1
            if left[0] == 0:
                done()

        number = group[0] if group else 0
        streams = []
        for _ in range(chunks):
            phases = self._plan(kind, chunk, dims, group[1] if group else None)
            if not phases:
                break
            tag = (number, self._numbers.get(number, 0))
            self._numbers[number] = tag[1] + 1
            streams.append(Stream(tag, phases, priority, one_done))
        # A collective over dimensions of one NPU has nothing to move, but ends with an event.
        if not streams:
            self.after(0, done)
        for stream in streams:
            self._enter(stream)

    def _plan(
        self, kind: str, size: int, dims: Sequence[bool] | None, members: list[int] | None
    ) -> list[Phase]:
        algorithms = self.system.algorithms(kind, len(self.shape))
        if members is not None and len(members) < math.prod(self.shape):
            return self._plan_group(algorithms, kind, size, members)
        # A group of all NPUs is the network, whose dimensions it uses all.
        if members is not None:
            dims = None
        axes = logical_axes(algorithms, self.shape)
        used = [i for i, (count, _) in enumerate(axes) if count > 1 and (dims is None or dims[i])]
        # An all-gather takes the dimensions in reverse, as the way back of an all-reduce does.
        if kind == "all_gather":
            used.reverse()
        # The bandwidth-aware plan reduces in each dimension before the next one, so that the later
        # dimensions move less; the baseline moves everything in each.
        steps: list[tuple[str, int, int]]
        if (
            kind == "all_reduce"
            and self.system.collective_optimization == "localBWAware"
            and len(used) > 1
        ):
            steps = [("reduce_scatter", dim, 1) for dim in used[:-1]] + [
                ("all_reduce", used[-1], 1)
            ]
            steps += [("all_gather", dim, -1) for dim in reversed(used[:-1])]
        else:
            steps = [(kind, dim, 1) for dim in used]
        phases = []
        for phase_kind, dim, direction in steps:
            count, stride = axes[dim]
            phases.append(
                Phase(
                    dim,
                    self._builder(
                        algorithms[dim],
                        phase_kind,
                        dim,
                        self._members(count, stride),
                        size,
                        direction,
                    ),
                )
            )
            size = {"all_gather": size * count, "reduce_scatter": size // count}.get(
                phase_kind, size
            )
        return phases

    def _plan_group(
        self, algorithms: Sequence[str], kind: str, size: int, members: list[int]
    ) -> list[Phase]:
        """Plan a collective of some NPUs, which is one dimension of their own.

        It goes by the system file's algorithm if that is one for all dimensions, and is a ring
        otherwise; that is so since ASTRA-sim's pull request 351.
        """
        if len(members) == 1:
            return []
        name = algorithms[0] if len(algorithms) == 1 else "ring"
        if name == "doubleBinaryTree":
            raise ConfigError(
                "doubleBinaryTree must be of a collective of all NPUs; got a communicator group of "
                f"{len(members)}. Use ring, direct or halvingDoubling."
            )
        return [Phase(0, self._builder(name, kind, 0, members, size, 1, local=True))]

    def _members(self, count: int, stride: int) -> list[int]:
        first = self.id - (self.id // stride % count) * stride
        return [first + i * stride for i in range(count)]

    def _builder(
        self,
        name: str,
        kind: str,
        dim: int,
        members: list[int],
        size: int,
        direction: int,
        *,
        local: bool = False,
    ) -> Callable[[Stream], Algorithm]:
        delay = LOCAL_DELAY_NS if local else self.system.endpoint_delay
        plain = name.removeprefix("one").lower()

        def part(stream: Stream) -> Part:
            return Part(self, stream, kind, members, size, delay, direction, local)

        if plain == "ring":
            return lambda stream: Ring(part(stream))
        if plain.startswith("direct"):
            window = int(plain.removeprefix("direct") or -1)
            return lambda stream: Direct(part(stream), window)
        power_of_two = len(members) & (len(members) - 1) == 0
        if not power_of_two:
            raise ConfigError(
                f"{name} must have a power of two of NPUs in its dimension; got {len(members)}. "
                "Use ring or direct."
            )
        if plain == "halvingdoubling":
            if kind == "all_to_all":
                raise ConfigError(
                    "all-to-all-implementation must be ring or direct; got halvingDoubling. Use "
                    "direct."
                )
            return lambda stream: HalvingDoubling(part(stream))
        if kind != "all_reduce":
            raise ConfigError(
                f"doubleBinaryTree must be of an all-reduce; got {kind}. Use ring or direct."
            )
        # Chunks take the two trees in turn, as in ASTRA-sim.
        turn = self._trees.get((dim, kind), 0)
        self._trees[dim, kind] = turn + 1
        links = binary_tree(members, root_last=turn % 2 == 0)[self.id]
        return lambda stream: Tree(self, stream, links, size, delay)

    # In each dimension chunks wait for their turn, a few at a time.

    def _enter(self, stream: Stream) -> None:
        self._queue_up(stream)
        self._start_some(stream.dimension)

    def _queue_up(self, stream: Stream) -> None:
        """Insert a chunk into its next dimension's queue: after running and more urgent chunks."""
        phase = stream.phases.pop(0)
        stream.dimension, stream.running, stream.algorithm = (
            phase.dimension,
            False,
            phase.build(stream),
        )
        queue = self._queues.setdefault(phase.dimension, [])
        position = next(
            (
                i
                for i, queued in enumerate(queue)
                if not queued.running and queued.priority < stream.priority
            ),
            len(queue),
        )
        queue.insert(position, stream)

    def _start_some(self, dimension: int) -> None:
        queue = self._queues[dimension]
        while (running := self._running.get(dimension, 0)) < min(
            len(queue), self.system.active_chunks_per_dimension
        ):
            stream = queue[running]
            stream.running = True
            self._running[dimension] = running + 1
            assert stream.algorithm is not None
            stream.algorithm.start()

    def finish_phase(self, stream: Stream) -> None:
        """End a stream's algorithm: it goes on to its next dimension, or is done."""
        left = stream.dimension
        if not stream.phases:
            stream.done()
        self._queues[left].remove(stream)
        self._running[left] -= 1
        if stream.phases:
            self._queue_up(stream)
            self._start_some(left)
            self._start_some(stream.dimension)
        else:
            self._start_some(left)
