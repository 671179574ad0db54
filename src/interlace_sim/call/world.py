"""Programs of kernels on several GPUs, as processes of the event engine, and what they record.

A *process* is a generator: it yields nanoseconds that pass, or the keys of what it waits for. A key
is posted once, when what it names has arrived. Programs record the same kinds of events as kernels
do in a trace (:mod:`interlace.tracing.events`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping

from interlace_sim.engine import Engine, Join, Server, duration_ns
from interlace_sim.fabric import Fabric
from interlace_sim.machine import Machine

Key = Hashable
Process = Generator[int | Iterable[Key], None, None]

_FIRST_STREAM = 7
"""The number of the first stream, as GPUs' tools number those that programs use."""

COPIES = 100
"""The number of the stream of copies."""

_PROGRAM_SHARE = 1 / 66
"""Share of a memory's rate that one program reaches: assumed twice what each of 132 has if all of
them move bytes at once.
"""


@dataclasses.dataclass(frozen=True)
class Event:
    """One event of one program.

    Attributes:
        time_ns: Time since the call began.
        kind: ``"begin"``, ``"tile"``, ``"computed"``, ``"put"``, ``"signal"``, ``"wait"``,
            ``"arrived"`` or ``"unpacked"``.
        number: A tile, a slice, the bytes of a put, or the number of a signal.
        peer: Rank at the other end; -1 without one.
        lane: 0, or the rank for which one of several threads has recorded it.
    """

    time_ns: int
    kind: str
    number: int = 0
    peer: int = -1
    lane: int = 0


@dataclasses.dataclass
class Launch:
    """One launch of a kernel on one rank: its name, and the events of each program."""

    name: str
    programs: dict[int, list[Event]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Activity:
    """A kernel of a library, or a copy: what happens beside the kernels that record events."""

    name: str
    stream: int
    start_ns: int
    duration_ns: int


@dataclasses.dataclass(frozen=True)
class SimulatedCall:
    """The timeline of one call.

    Attributes:
        total_ns: Time until the last event or activity of all ranks.
        launches: The launches of each rank, in the order in which they are enqueued.
        activities: What runs beside them on each rank.
        sent_bytes: Bytes that leave all ranks together.
    """

    total_ns: int
    launches: list[list[Launch]]
    activities: list[list[Activity]]
    sent_bytes: float


class World:
    """Ranks of one machine, their links, and everything that they record.

    Attributes:
        machine: The machine.
        ranks: Number of ranks.
        engine: The clock.
    """

    def __init__(self, machine: Machine, ranks: int) -> None:
        self.machine, self.ranks, self.engine = machine, ranks, Engine()
        self._fabric = Fabric(self.engine, machine.build_topology(ranks), mirrored=False)
        self._memories = [Server("memory") for _ in range(ranks)]
        self._launches: list[list[Launch]] = [[] for _ in range(ranks)]
        self._activities: list[list[Activity]] = [[] for _ in range(ranks)]
        self._posted: set[Key] = set()
        self._waiting: dict[Key, list[Callable[[], None]]] = defaultdict(list)
        self._leaving: dict[tuple[int, int, float], list[tuple[float, Key]]] = defaultdict(list)
        self._signals: dict[Key, int] = {}
        self._sent_bytes = 0.0

    def finish(self) -> SimulatedCall:
        """Run all processes to their ends; return what they have recorded."""
        end_ns = self.engine.run()
        assert not self._waiting, f"nobody posts {next(iter(self._waiting))}"
        # A launch has one number on all ranks, whose streams may run ahead of one another.
        names = [launch.name for launch in self._launches[0]]
        for of_rank in self._launches:
            of_rank.sort(key=lambda launch: names.index(launch.name))
        return SimulatedCall(end_ns, self._launches, self._activities, self._sent_bytes)

    # Processes

    def start(self, process: Process) -> None:
        """Let a process begin now."""
        self.engine.after(0, self._resume, process)

    def post(self, key: Key) -> None:
        """Let everything go on that waits for a key, now and later."""
        self._posted.add(key)
        for done in self._waiting.pop(key, ()):
            done()

    def _resume(self, process: Process) -> None:
        request = next(process, None)
        if request is None:
            return
        if isinstance(request, int):
            self.engine.after(request, self._resume, process)
            return
        missing = [key for key in request if key not in self._posted]
        join = Join(len(missing), lambda: self.engine.after(0, self._resume, process))
        for key in missing:
            self._waiting[key].append(join.done)

    # Links

    def send(
        self, rank: int, peer: int, nbytes: float, key: Key, *, efficiency: float = 1.0
    ) -> None:
        """Send bytes to a peer now; the key is posted when the last of them is there.

        What leaves at one instant for one peer travels together: a link's time is in whole
        nanoseconds, in which hundreds of words pass it.
        """
        self._sent_bytes += nbytes
        route = rank, peer, efficiency
        if route not in self._leaving:
            self.engine.after(0, self._leave, route)
        self._leaving[route].append((nbytes, key))

    def _leave(self, route: tuple[int, int, float]) -> None:
        rank, peer, efficiency = route
        messages = self._leaving.pop(route)

        def arrived() -> None:
            for _, key in messages:
                self.post(key)

        size = sum(nbytes for nbytes, _ in messages)
        self._fabric.send(rank, peer, size, arrived, efficiency=efficiency)

    def signal(self, key: Key) -> None:
        """Post a key at the time at which the peer sees a signal that is set now."""
        self.engine.after(round(self.machine.collectives.slice_ns.value), self.post, key)

    def number_of(self, signal: Key) -> int:
        """Return the number by which a trace knows a signal."""
        return self._signals.setdefault(signal, len(self._signals))

    # Records

    def launch(self, rank: int, name: str) -> Launch:
        """Return a new launch of a kernel, which has no programs yet."""
        self._launches[rank].append(Launch(name))
        return self._launches[rank][-1]

    def active(self, rank: int, name: str, start_ns: int, *, stream: int = _FIRST_STREAM) -> None:
        """Record an activity that has begun at a time and ends now."""
        self._activities[rank].append(Activity(name, stream, start_ns, self.engine.now - start_ns))

    def move(self, rank: int, nbytes: float) -> int:
        """Return the time for which a program moves bytes of a rank's memory from now on.

        Programs share the memory's rate, first come, first served; alone, one of them reaches a
        small part of it.
        """
        whole_ns = self.memory_ns(nbytes)
        waited_ns = self._memories[rank].reserve(self.engine.now, whole_ns) - self.engine.now
        return max(waited_ns + whole_ns, self.memory_ns(nbytes, _PROGRAM_SHARE))

    def read_ns(self, nbytes: float) -> int:
        """Return the time in which a kernel reads bytes of device memory and hardly writes."""
        gpu = self.machine.gpu
        efficiency = gpu.read_efficiency.value or gpu.memory_efficiency.value
        return duration_ns(nbytes, gpu.memory_bytes_per_s.value * efficiency)

    def memory_ns(self, nbytes: float, share: float = 1.0) -> int:
        """Return the time to move bytes of device memory at a share of its rate."""
        gpu = self.machine.gpu
        bytes_per_s = gpu.memory_bytes_per_s.value * gpu.memory_efficiency.value
        return duration_ns(nbytes, bytes_per_s * share)


class Program:
    """One program of a launch: it records events on behalf of its process.

    Attributes:
        world: The ranks.
        rank: Its rank.
        number: Its number.
    """

    def __init__(self, world: World, rank: int, launch: Launch, number: int) -> None:
        self.world, self.rank, self.number = world, rank, number
        self._events = launch.programs.setdefault(number, [])
        self.record("begin")

    @property
    def peers(self) -> list[int]:
        """Return the other ranks, the next one first."""
        return [(self.rank + 1 + i) % self.world.ranks for i in range(self.world.ranks - 1)]

    def record(self, kind: str, number: int = 0, peer: int = -1, lane: int = 0) -> None:
        """Record an event now."""
        self._events.append(Event(self.world.engine.now, kind, number, peer, lane))

    def signal(self, keys: Mapping[int, Key]) -> None:
        """Set a signal at each of several peers; by rank, the keys that are posted then."""
        for lane in range(self.world.ranks):
            key = keys.get(lane)
            if key is not None:
                self.record("signal", self.world.number_of(key), lane, lane)
                self.world.signal(key)
            elif lane == 0:
                self.record("signal")

    def wait(self, what: int, keys: Mapping[int, Key]) -> Process:
        """Wait for signals of several peers; ``what`` is the slice that the event names."""
        lanes = range(self.world.ranks)
        for lane in lanes:
            if lane in keys or lane == 0:
                self.record("wait", what, lane if lane in keys else -1, lane)
        yield list(keys.values())
        for lane in lanes:
            if lane in keys:
                self.record("arrived", self.world.number_of(keys[lane]), lane, lane)
            elif lane == 0:
                self.record("arrived")

    def barrier(self, name: Key) -> Process:
        """Meet the programs of the same number on all peers, by signals."""
        me = self.rank
        self.signal({peer: (name, self.number, me, peer) for peer in self.peers})
        yield from self.wait(0, {peer: (name, self.number, peer, me) for peer in self.peers})
