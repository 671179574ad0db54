"""The group that is simulated: GPUs with their memories, and the links between them.

With *mirrored* traffic there is one GPU, and all of the group do the same at the same time: what it
sends arrives at it as well. In detail there are all of them, and each may be slower than the
others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from interlace.sim import topology
from interlace.sim.engine import Engine
from interlace.sim.fabric import Fabric
from interlace.sim.results import LinkUse, Span
from interlace.sim.t3.machine import T3Machine
from interlace.sim.t3.memory import Kind, Memory

BytesBy = dict[tuple[str, Kind], float]

TOPOLOGIES = ("ring", "full", "switch")
"""A ring's link carries all that leaves a GPU, a full mesh shares as much out over its links, a
switch has a port a GPU.
"""
CLOSE_NS = 50
USE_BYTES = 1 << 18
"""What is recorded of the memory: uses of one cause with shorter gaps, up to this size, are one."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """A block's way: its tile stores it, it is in memory, its last update triggers the transfer,
    which goes to the link.
    """

    block: int
    stored_ns: int
    updated_ns: int
    triggered_ns: int
    sent_ns: int


@dataclasses.dataclass(frozen=True)
class Part:
    """One piece of a sub-layer, simulated: the product, a collective, or both at once. Of GPU 0,
    except for the time.

    Attributes:
        time_ns: until the last GPU has ended.
        product_ns: when its product has ended; 0 without one.
    """

    name: str
    time_ns: int
    product_ns: int
    memory: BytesBy
    memory_busy_ns: float
    sent_bytes: dict[str, float]
    spans: list[Span]
    uses: list[LinkUse]
    events: int
    queue_entries: float
    mean_queue_entries: float
    row_misses: float
    waited_ns: int = 0
    tracker_entries: int = 0
    tracker_overflows: int = 0
    threshold: float | None = None
    flows: tuple[Flow, ...] = ()


class Gpu:
    """One of the group."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank
        self.machine, self.engine = group.machine, group.engine
        self.memory = Memory(group.engine, group.machine, group.used_memory if rank == 0 else None)
        self.spans: list[Span] = []
        self.product_ns = 0

    def send(
        self, to: int, size: float, traffic: str, arrived: Callable[[Gpu], None], share: float = 1.0
    ) -> None:
        """To the GPU ``to`` further on; ``arrived(gpu)`` there.

        Args:
            share: of the link's bandwidth that the sender reaches.
        """
        group = self.group
        there = group.gpus[(self.rank + to) % len(group.gpus)]
        source, destination = (
            (0, to) if group.mirrored else (self.rank, (self.rank + to) % group.ranks)
        )
        group.fabric.send(
            source, destination, size, lambda: arrived(there), traffic=traffic, efficiency=share
        )


class Group:
    """All GPUs of a group, or one that stands for them."""

    def __init__(
        self, machine: T3Machine, ranks: int, network: str, *, mirrored: bool = True
    ) -> None:
        self.machine, self.ranks, self.mirrored = machine, ranks, mirrored
        self.engine = Engine()
        self.uses: list[LinkUse] = []
        self._open_uses: dict[str, LinkUse] = {}
        links = ranks - 1 if network == "full" else 1
        self.topology = topology.build(
            network,
            ranks,
            bytes_per_s=machine.network.bytes_per_s.value / links,
            latency_ns=round(machine.network.latency_ns.value / (2 if network == "switch" else 1)),
        )
        self.fabric = Fabric(self.engine, self.topology, mirrored=mirrored, observe=self._used_link)
        self.gpus = [Gpu(self, rank) for rank in range(1 if mirrored else ranks)]

    def run(self, name: str) -> Part:
        """To the end; what happened on GPU 0."""
        time_ns = self.engine.run()
        self.uses.extend(self._open_uses.values())
        first = self.gpus[0]
        memory = first.memory
        names = [link.name for link in self.topology.classes]
        sent = zip(names, self.fabric.sent_bytes, strict=True)
        return Part(
            name=name,
            time_ns=time_ns,
            product_ns=first.product_ns,
            memory=memory.bytes,
            memory_busy_ns=memory.busy_ns,
            sent_bytes={link: size / len(self.gpus) for link, size in sent if size},
            spans=first.spans,
            uses=self.uses,
            events=self.engine.events,
            queue_entries=memory.most_entries,
            mean_queue_entries=memory.mean_entries(),
            row_misses=memory.row_misses / max(1, memory.accesses),
            waited_ns=memory.waited_ns,
        )

    def latency_ns(self, to: int) -> int:
        """Of a message without bytes to the GPU ``to`` further on."""
        return self.topology.path_latency_ns(0, to)

    def used_memory(self, cause: str, start: int, end: int, size: float) -> None:
        """Record what GPU 0's memory did; accesses of a cause that are close together are one use."""
        last = self._open_uses.get(cause)
        if last is not None and start - last.end_ns < CLOSE_NS and last.size < USE_BYTES:
            self._open_uses[cause] = LinkUse("memory", cause, last.start_ns, end, last.size + size)
            return
        if last is not None:
            self.uses.append(last)
        self._open_uses[cause] = LinkUse("memory", cause, start, end, size)

    def _used_link(self, link: str, traffic: str, start: int, end: int, size: float) -> None:
        self.uses.append(LinkUse(link, traffic, start, end, size))
