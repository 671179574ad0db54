"""Simulation of one step of a program on every rank of a machine's network.

The program is a list of tasks in rows, see :mod:`interlace_sim.work`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

from interlace.errors import ConfigError
from interlace.units import ceil_div
from interlace_sim.bounds import sent_before, step_bound
from interlace_sim.collectives import Group, Round, schedule
from interlace_sim.engine import Engine, duration_ns
from interlace_sim.exchange import TREE_PIECES, Rounds, Setting, Slices, Trees, in_pieces
from interlace_sim.fabric import Fabric
from interlace_sim.kernel_time import kernel_ns, launch_and_body_ns
from interlace_sim.machine import Machine
from interlace_sim.results import LinkUses, Result, Span, TaskTime
from interlace_sim.topology import Topology
from interlace_sim.work import (
    COMPUTE,
    COPY,
    Collective,
    Consuming,
    Exchanging,
    Fused,
    HostCopy,
    Kernel,
    Message,
    Task,
)

Watch = Callable[[Callable[[], float]], None]


def run(
    machine: Machine,
    topology: Topology,
    tasks: Sequence[Task],
    *,
    name: str = "step",
    all_ranks: bool = False,
    extra_ns: Callable[[Result], int] | None = None,
    watch: Watch | None = None,
) -> Result:
    """Simulate the tasks on every rank.

    Args:
        machine: GPUs, collective library and links.
        topology: Network of the machine's ranks.
        tasks: One rank's program in the order in which it issues the tasks; every rank has it.
        name: The result's name.
        all_ranks: Keep every rank and every link instead of one of each kind; slower by as many
            times, and needed for ``double_binary_tree``.
        extra_ns: Function from the result to the nanoseconds that are added to it in the end (a
            pipeline's fill and drain).
        watch: Called before the run with a function that a thread may call during the run: it
            returns about which share of the run is done, from 0 to 1.

    Raises:
        ConfigError: tasks wait for one another, or for tasks that do not exist.
        UnphysicalError: the outcome lies under the physical bound: a fault of the model.
    """
    _check(tasks)
    simulation = _Simulation(machine, topology, tasks, all_ranks)
    if watch is not None:
        watch(simulation.share_done(simulation.expected_uses()))
    simulation.start()
    result = simulation.finish(name)
    if extra_ns is not None:
        added = extra_ns(result)
        result = dataclasses.replace(result, total_ns=result.total_ns + added, added_ns=added)
    result.bound.check(result.total_ns, name)
    return result


def _check(tasks: Sequence[Task]) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.name in seen:
            raise ConfigError(
                f"tasks must have different names; got {task.name!r} twice. Rename one."
            )
        for dep in task.deps:
            if dep not in seen:
                raise ConfigError(
                    f"task {task.name!r} must wait for tasks before it; got {dep!r}, which is "
                    "none. Put it before, or break the cycle."
                )
        seen.add(task.name)


def _before(tasks: Sequence[Task]) -> list[tuple[str, ...]]:
    """List the tasks that each task waits for: its dependencies, and its row's task before it."""
    last: dict[str, str] = {}
    out = []
    for task in tasks:
        out.append((*task.deps, last[task.row]) if task.row in last else task.deps)
        last[task.row] = task.name
    return out


class _Rank:
    """One rank's rows of tasks and its progress through them."""

    def __init__(self, number: int, tasks: Sequence[Task]) -> None:
        self.number = number
        self.rows: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            self.rows.setdefault(task.row, []).append(index)
        self.next = dict.fromkeys(self.rows, 0)
        self.running: set[str] = set()
        self.done: dict[str, int] = {}
        self.times: list[TaskTime] = []
        self.compute_ns = 0
        # Computation of each task so far, by its index.
        self.computed: collections.Counter[int] = collections.Counter()
        self.memory_bytes = 0.0
        self.copy_ns = 0


class _Simulation:
    """A run of the tasks: the ranks, the network, and the records of rank 0."""

    def __init__(
        self, machine: Machine, topology: Topology, tasks: Sequence[Task], all_ranks: bool
    ) -> None:
        self.machine, self.topology, self.tasks = machine, topology, tasks
        self.engine = Engine()
        self.spans: list[Span] = []
        self.link_uses = LinkUses()
        self.fabric = Fabric(
            self.engine, topology, mirrored=not all_ranks, observe=self.link_uses.add
        )
        self.all_ranks = all_ranks
        self.setting = Setting(machine, topology, self.engine, self.fabric, all_ranks)
        self.ranks = [_Rank(number, tasks) for number in range(topology.ranks if all_ranks else 1)]
        self.group = functools.cache(functools.partial(Group, topology))
        # The ranks of a collective meet in one object, which the first of them creates.
        self.shared: dict[int, Rounds | Trees] = {}
        self.before = _before(tasks)

    def start(self) -> None:
        for rank in self.ranks:
            self.engine.at(0, self._advance, rank)
        self.engine.run()

    def share_done(self, expected: float) -> Callable[[], float]:
        """Return a function that says which share of the expected link uses has been simulated."""
        return lambda: len(self.link_uses) / expected if expected else 0.0

    def expected_uses(self) -> float:
        """Estimate how often rank 0's links will be used; a run's time is nearly all for that."""
        hops = functools.cache(functools.partial(self.fabric.hops, 0))
        total = 0.0
        for task in self.tasks:
            work = task.work
            if isinstance(work, Message):
                total += hops(self.group(work.axes[-1:]).displacement(1))
            elif isinstance(work, Collective | Fused | Consuming) and not sent_before(work):
                group = self.group(work.axes)
                if not isinstance(work, Collective):
                    once = sum(hops(group.displacement(to)) for to in range(1, group.size))
                    times = 2 if work.kind == "all_reduce" else 1
                    total += times * once * self._slice_count(work)
                elif work.algorithm == "double_binary_tree":
                    # Two trees, up and down each; how far parents are depends on the rank.
                    total += 4 * TREE_PIECES * hops(group.displacement(1))
                else:
                    total += sum(
                        hops(group.displacement(to))
                        for step in self._rounds(work)
                        for to, _ in step.sends
                    )
        return total

    def finish(self, name: str) -> Result:
        # Out of events with tasks left: the tasks wait in a circle, over rows or over ranks.
        late = [rank for rank in self.ranks if len(rank.done) < len(self.tasks)]
        if late:
            stuck = next(task.name for task in self.tasks if task.name not in late[0].done)
            raise ConfigError(
                f"every task must end; rank {late[0].number} never ended {stuck!r}. Break the "
                "cycle it waits in."
            )
        # A step ends with its slowest rank, whose times are reported.
        last = max(self.ranks, key=lambda rank: max(rank.done.values(), default=0))
        total = max(last.done.values(), default=0)
        busy: dict[str, int] = {}
        for server in self.fabric.servers().values():
            busy[server.name] = max(busy.get(server.name, 0), server.busy_ns)
        return Result(
            name=name,
            total_ns=total,
            exposed_ns=total - last.compute_ns,
            busy_ns={COMPUTE: last.compute_ns, **self._memory_and_copies(last), **busy},
            memory_bytes=last.memory_bytes,
            sent_bytes={
                link.name: sent / len(self.ranks)
                for link, sent in zip(self.topology.classes, self.fabric.sent_bytes, strict=True)
                if sent
            },
            traffic_bytes=self.traffic(),
            tasks=last.times,
            spans=self.spans,
            link_uses=self.link_uses,
            bound=step_bound(self.machine, self.topology, self.tasks),
            events=self.engine.events,
            ranks=self.topology.ranks,
            topology=self.topology.name,
            machine=self.machine.name,
            all_ranks=self.all_ranks,
        )

    def _memory_and_copies(self, rank: _Rank) -> dict[str, int]:
        """Return the nanoseconds that device memory and copy engines worked, if they did."""
        gpu = self.machine.gpu
        memory = duration_ns(
            rank.memory_bytes, gpu.memory_bytes_per_s.value * gpu.memory_efficiency.value
        )
        return {name: time for name, time in (("memory", memory), (COPY, rank.copy_ns)) if time}

    def traffic(self) -> dict[str, float]:
        """Return the bytes that leave a rank, by collective."""
        out: dict[str, float] = {}
        for task in self.tasks:
            work = task.work
            if isinstance(work, Message):
                out["message"] = out.get("message", 0.0) + work.size
            elif isinstance(work, Collective | Fused | Consuming) and not sent_before(work):
                name = work.kind
                if isinstance(work, Collective) and work.algorithm != "double_binary_tree":
                    sent = sum(size for step in self._rounds(work) for _, size in step.sends)
                else:
                    n = self.group(work.axes).size
                    # What does not divide evenly travels in blocks of the largest part.
                    block = ceil_div(work.size, n)
                    if name == "all_reduce":
                        # Parts go to their owners, and the owners' sums go to every rank.
                        gathered = work.gather_size if isinstance(work, Fused) else None
                        block += ceil_div(work.size if gathered is None else gathered, n)
                    sent = block * (n - 1)
                out[name] = out.get(name, 0.0) + sent
        return out

    # The methods from here on move a rank through its rows of tasks.

    def _advance(self, rank: _Rank) -> None:
        """Start every task that is next in its row and waits for nothing."""
        # A row is a stream: its head blocks the tasks behind it, even those that could start.
        for row, indices in rank.rows.items():
            at = rank.next[row]
            if row in rank.running or at == len(indices):
                continue
            task = self.tasks[indices[at]]
            if any(dep not in rank.done for dep in task.deps):
                continue
            rank.next[row] = at + 1
            rank.running.add(row)
            # A task of no time ends within this call and advances the rank again, which is why the
            # row moved on and counts as running before.
            self._begin(rank, indices[at], self.engine.now)

    def _end(self, rank: _Rank, index: int, start: int) -> None:
        task, now = self.tasks[index], self.engine.now
        # Of the tasks that this one waited for, the last to end is the critical path's link.
        cause = max(self.before[index], key=lambda name: rank.done[name], default=None)
        rank.done[task.name] = now
        rank.running.discard(task.row)
        rank.compute_ns += rank.computed[index]
        rank.times.append(TaskTime(task.name, task.row, start, now, cause, rank.computed[index]))
        self._advance(rank)

    def _begin(self, rank: _Rank, index: int, start: int) -> None:
        task = self.tasks[index]
        work = task.work

        def end() -> None:
            self._span(rank, task.row, task.name, start, self.engine.now)
            if isinstance(work, HostCopy | Message):
                rank.copy_ns += self.engine.now - start
            self._end(rank, index, start)

        if isinstance(work, Kernel):
            rank.computed[index] = duration = self._compute_ns(rank, work)
            self.engine.after(duration, end)
        elif isinstance(work, Collective):
            # A library launches a kernel before anything moves; the launch is not computation.
            launch = round(self.machine.collectives.launch_ns.value)
            self.engine.after(launch, self._collective, rank, index, work, end)
        elif isinstance(work, Fused):
            self._fused(rank, index, work, end)
        elif isinstance(work, Consuming):
            self._consuming(rank, index, work, end)
        elif isinstance(work, Message):
            self._message(rank, work, end)
        else:
            self.engine.after(
                duration_ns(work.size, self.machine.gpu.host_link_bytes_per_s.value), end
            )

    def _compute_ns(self, rank: _Rank, kernel: Kernel) -> int:
        """Return the time of a kernel alone, and count the bytes that it moves."""
        rank.memory_bytes += kernel.memory_bytes
        return kernel_ns(self.machine.gpu, kernel)

    # The methods from here on start the tasks that communicate.

    def _rounds(self, work: Collective) -> list[Round]:
        group = self.group(work.axes)
        rounds = schedule(work.kind, work.algorithm, work.size, group)
        if (
            not self.all_ranks
            and any(step.exchange for step in rounds)
            and not group.exchanges_symmetrically()
        ):
            # Exchanges by bits (rank XOR distance) are shifts only where links do not run along the
            # coordinates, so one rank cannot stand for all of them on a ring or torus.
            raise ConfigError(
                f"{work.algorithm} on {self.topology.name} must be run on every rank; it is not "
                "the same for all there. Ask for all ranks (--all-ranks), or use ring."
            )
        # Without pieces, the first message of a round would occupy a shared link to its end.
        piece = self.machine.collectives.piece_bytes
        return rounds if piece is None else [in_pieces(step, piece.value) for step in rounds]

    def _collective(
        self, rank: _Rank, index: int, work: Collective, end: Callable[[], None]
    ) -> None:
        shared = self.shared.get(index)
        if shared is None:
            if work.algorithm == "double_binary_tree":
                if not self.all_ranks:
                    raise ConfigError(
                        "double_binary_tree must be run on every rank; it is not the same for "
                        "all. Add --all-ranks."
                    )
                shared = Trees(self.setting, work, self.group(work.axes))
            else:
                shared = Rounds(self.setting, self._rounds(work), self.group(work.axes), work.kind)
            self.shared[index] = shared
        shared.enter(rank.number, end)

    def _message(self, rank: _Rank, work: Message, end: Callable[[], None]) -> None:
        # Neighbouring pipeline stages differ in the outermost coordinate, which crosses nodes.
        displacement = self.group(work.axes[-1:]).displacement(1)
        destination = (
            self.topology.shift(rank.number, displacement) if self.all_ranks else displacement
        )
        self.fabric.send(rank.number, destination, work.size, end, traffic="message")

    def _slices(self, rank: _Rank, index: int, work: Exchanging) -> Slices:
        group = self.group(work.axes)
        shared = self.shared.setdefault(index, Rounds(self.setting, [], group, work.kind))
        assert isinstance(shared, Rounds)
        block, count = ceil_div(work.size, group.size), self._slice_count(work)
        shares = work.shares if isinstance(work, Fused) and count == work.slices else ()
        return Slices(self.setting, rank.number, shared, block, count, shares)

    def _slice_count(self, work: Exchanging) -> int:
        # No more slices than bytes, so that no slice is empty.
        return min(work.slices, max(1, ceil_div(work.size, self.group(work.axes).size)))

    def _fused(self, rank: _Rank, index: int, work: Fused, end: Callable[[], None]) -> None:
        """Run a fused kernel: slices leave as they are computed.

        The kernel ends when its own work is done and the peers' slices have arrived.
        """
        library, group = self.machine.collectives, self.group(work.axes)
        launch, body = self._launch_and_body(rank, index, work.kernel)
        slices = self._slices(rank, index, work)
        # The last rank's slices arrive later than this rank's by the spread of the kernels' ends.
        skew = round(body * library.skew.value)
        # A consuming task waits for the peers' slices, so this kernel ends with its computation.
        if not work.waits:
            slices.produce(launch, body, None)
            self.engine.after(launch + body, end)
            return
        receive = (
            self._compute_ns(rank, Kernel(memory_bytes=work.receive_bytes))
            if work.receive_bytes
            else 0
        )
        rank.computed[index] += receive
        wait = round(library.slice_ns.value) + skew
        if work.kind == "all_reduce":
            sums = work.size if work.gather_size is None else work.gather_size
            # Adding up is a part of each own slice, after which its sums leave.
            slices.all_reduce(
                launch,
                body,
                receive,
                ceil_div(sums, group.size),
                lambda: self.engine.after(wait, end),
            )
        else:
            slices.produce(launch, body, lambda: self.engine.after(wait + receive, end))

    def _launch_and_body(self, rank: _Rank, index: int, kernel: Kernel) -> tuple[int, int]:
        """Return the times of a fused kernel's launch and body, and count what it does."""
        rank.memory_bytes += kernel.memory_bytes
        launch, body = launch_and_body_ns(self.machine, kernel)
        rank.computed[index] = launch + body
        return launch, body

    def _consuming(self, rank: _Rank, index: int, work: Consuming, end: Callable[[], None]) -> None:
        """Run a consuming kernel: everything is sent at once.

        A slice is computed when it has arrived and the slice before it is done.
        """
        launch, body = self._launch_and_body(rank, index, work.kernel)
        # The slices arrive under the task that sent them, so that is where their arrivals count.
        if work.sent_by is not None:
            index = next(i for i, task in enumerate(self.tasks) if task.name == work.sent_by)
        self._slices(rank, index, work).consume(launch, body, end, work.sent_by is None)

    def _span(self, rank: _Rank, row: str, name: str, start: int, end: int) -> None:
        # Only rank 0 is recorded, as of the links only its own are.
        if rank.number == 0:
            self.spans.append(Span(row, name, start, end))
