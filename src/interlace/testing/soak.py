"""What each rank of ``interlace soak`` does: random calls, every result checked on the device.

The calls come in *rounds*. A round prepares some cases, captures some of them in CUDA graphs, and
then makes calls of them in random order; the results are looked at on the host when the round ends.
Rounds and calls are a function of the seed alone, and so the same on every rank; delays differ by
rank.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm import Faults, group_of, inject
from interlace.errors import InterlaceError
from interlace.testing.cases import Case, Prepared, draw_case

ROUND_CALLS = {"cpu": 24, "cuda": 50_000}
"""Calls per round. A soak can begin at any round, so a failure is repeated without the rounds
before it.
"""

_CASES = {"cpu": 6, "cuda": 32}  # per round
_GRAPHS = 10
_MOST_CALLS_IN_GRAPH = 12
_REPLAYS = 0.4  # of the steps
_VARIANTS = 3
_STREAMS = 3
_MOST_RESULTS = 8
_CALLS_BETWEEN_LOOKS = {"cpu": 6, "cuda": 500}  # after which the ranks agree whether to go on
# Beyond the deadline, for peers to end their own waits before the ranks compare what they saw
_GRACE_S = 120.0

# Delays: how often, and how long at most.
_HOST_SLEEPS, _HOST_SLEEP_S = 0.02, 0.002
_DEVICE_SLEEPS, _DEVICE_SLEEP_CYCLES = 0.05, 1_000_000
_SLEEPS_IN_GRAPHS, _SLEEP_IN_GRAPH_CYCLES = 0.2, 100_000
_CPU_DELAY_S = 0.0002


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run, the same on every rank.

    Attributes:
        start: the number of the first call; a multiple of the calls per round.
        calls: how many calls to make at most; 0 for no limit.
        seconds: after how many seconds to end; 0 for no limit.
        operators: the operators to take; empty for all.
    """

    seed: int
    start: int = 0
    calls: int = 0
    seconds: float = 0.0
    operators: tuple[str, ...] = ()
    deadline_s: float = 60.0


# A round, by the seed alone


@dataclasses.dataclass(frozen=True)
class Slot:
    """A case that is prepared once per round: for which of the groups, and on which of the streams
    its calls run.
    """

    case: Case
    group: int
    stream: int


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a slot; or the replay of a graph, which makes several calls.

    Attributes:
        slots: the slot of each call.
        variants: the variant of the inputs of each call.
        graph: the graph's index; None for an ordinary call.
    """

    slots: tuple[int, ...]
    variants: tuple[int, ...]
    graph: int | None = None


@dataclasses.dataclass(frozen=True)
class Round:
    """Slots, what each graph replays, and the steps; a step's first call is number ``numbers[i]``
    of the round.
    """

    slots: list[Slot]
    graphs: list[Step]
    steps: list[Step]
    release: bool

    @property
    def numbers(self) -> list[int]:
        """The number within the round of each step's first call."""
        numbers, next_number = [], 0
        for step in self.steps:
            numbers.append(next_number)
            next_number += len(step.slots)
        return numbers


def make_round(number: int, plan: Plan, backend: str, group_sizes: Sequence[int]) -> Round:
    """Round ``number`` of a soak: the same on every rank, whatever came before."""
    source = random.Random(f"{plan.seed} {number}")
    slots = []
    for _ in range(_CASES[backend]):
        group = source.randrange(len(group_sizes))
        case = draw_case(group_sizes[group], source, plan.operators, large=backend == "cuda")
        slots.append(Slot(case, group, source.randrange(_STREAMS) if backend == "cuda" else 0))
    graphs = _draw_graphs(slots, source) if backend == "cuda" else []
    # Every slot is called once before graphs are captured, which cannot allocate memory.
    steps = [Step((i,), (0,)) for i in range(len(slots))]
    count = len(slots)
    while count < ROUND_CALLS[backend]:
        step = Step((source.randrange(len(slots)),), (source.randrange(_VARIANTS),))
        if graphs and source.random() < _REPLAYS:
            replay = source.choice(graphs)
            if count + len(replay.slots) <= ROUND_CALLS[backend]:
                step = replay
        steps.append(step)
        count += len(step.slots)
    # Memory that graphs have captured stays theirs until the group releases it.
    return Round(slots, graphs, steps, release=source.random() < (0.7 if graphs else 0.2))


def _draw_graphs(slots: list[Slot], source: random.Random) -> list[Step]:
    """Graphs of random calls, each of the slots of one group and stream."""
    places: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for i, slot in enumerate(slots):
        if slot.case.capturable:
            places[slot.group, slot.stream].append(i)
    graphs = []
    for number in range(_GRAPHS if places else 0):
        candidates = source.choice(list(places.values()))
        chosen = source.choices(candidates, k=source.randint(1, _MOST_CALLS_IN_GRAPH))
        variants = tuple(source.randrange(_VARIANTS) for _ in chosen)
        graphs.append(Step(tuple(chosen), variants, number))
    return graphs


# On a rank


@dataclasses.dataclass
class Failure:
    """A call that went wrong on a rank.

    Attributes:
        call: its number; for an error, that of the call during which it was noticed.
        kind: ``"wrong"``, ``"timeout"`` or ``"error"``.
        what: the call, and how many elements are wrong or what was raised.
    """

    rank: int
    call: int
    kind: str
    what: str


def run_rank(folder: str, plan: Plan) -> dict[str, Any]:
    """Run the plan on this rank. Collective over the default process group.

    Args:
        folder: where progress is written, as :func:`interlace.cli.ranks.advance` does.

    Returns:
        The report, the same on every rank: JSON of the calls made, of each operator and
            implementation, and of what failed.
    """
    return _Soak(Path(folder), plan).run()


class _Soak:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.rank = dist.get_rank()
        self.device = group_of().device
        self.backend = group_of().backend
        self.members = _memberships(dist.get_world_size())
        self.groups = [None, *(dist.new_group(ranks) for ranks in self.members[1:])]
        # Beside the groups under test, which may break: over it the ranks agree to go on or to end.
        self.control = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=plan.deadline_s + _GRACE_S)
        )
        self.deadline_s = group_of().deadline_s
        for group in self._own_groups():
            interlace.set_deadline(plan.deadline_s, group)
        self.streams: list[torch.cuda.Stream] = []
        if self.backend == "cuda":
            self.streams = [torch.cuda.Stream(self.device) for _ in range(_STREAMS)]
        self.started = time.monotonic()
        self.interrupted = False
        self.done = self.shown = 0
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.replays = self.backwards = self.rounds = 0
        self.failures: list[Failure] = []

    def run(self) -> dict[str, Any]:
        number = self.plan.start // ROUND_CALLS[self.backend]
        with self._stopped_by_interrupt():
            while self._run_round(number):
                number += 1
        interlace.set_deadline(self.deadline_s)  # of the default group, which others use too
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            found, [dataclasses.asdict(failure) for failure in self.failures], self.control
        )
        failures = sorted(
            (each for rank in found for each in rank), key=lambda each: (each["call"], each["rank"])
        )
        return self._report(failures)

    def _report(self, failures: list[dict[str, Any]]) -> dict[str, Any]:
        by_operator: dict[str, dict[str, int]] = {}
        for (operator, impl), count in sorted(self.counts.items()):
            by_operator.setdefault(operator, {})[impl] = count
        return {
            "backend": self.backend,
            "world_size": dist.get_world_size(),
            "groups": [list(ranks) for ranks in self.members],
            "seed": self.plan.seed,
            "start": self.plan.start,
            "round_calls": ROUND_CALLS[self.backend],
            "operators": list(self.plan.operators),
            "calls": self.done,
            "wrong": len({each["call"] for each in failures if each["kind"] == "wrong"}),
            "timeouts": len({each["call"] for each in failures if each["kind"] == "timeout"}),
            "errors": len({each["call"] for each in failures if each["kind"] == "error"}),
            "rounds": self.rounds,
            "replayed_in_graphs": self.replays,
            "with_backward": self.backwards,
            "seconds": round(time.monotonic() - self.started, 1),
            "deadline_s": self.plan.deadline_s,
            "interrupted": self.interrupted,
            "by_operator": by_operator,
            "failures": failures[:20],
        }

    # A round

    def _run_round(self, number: int) -> bool:
        """Whether another one follows."""
        calls = make_round(number, self.plan, self.backend, [len(ranks) for ranks in self.members])
        first = number * ROUND_CALLS[self.backend]
        wrong = torch.zeros(
            ROUND_CALLS[self.backend], _MOST_RESULTS, dtype=torch.int64, device=self.device
        )
        go_on, at = True, first
        made: list[Step] = []
        delays = random.Random(f"{self.plan.seed} {number} {self.rank}")
        runner: _Round | None = None
        try:
            with self._late(number):
                runner = _Round(self, calls, wrong)
                for i, (step, offset) in enumerate(zip(calls.steps, calls.numbers, strict=True)):
                    at = first + offset
                    runner.make(step, offset, delays)
                    made.append(step)
                    self._count(step, calls.slots)
                    if i % _CALLS_BETWEEN_LOOKS[self.backend] == 0 and not self._agree_to_go_on(
                        failed=False
                    ):
                        go_on = False
                        break
                runner.synchronize()
        except InterlaceError as error:
            kind = "timeout" if isinstance(error, interlace.PeerTimeoutError) else "error"
            self.failures.append(Failure(self.rank, at, kind, f"{type(error).__name__}: {error}"))
        if not self.failures:
            self._look(wrong, calls, made, first)
        self.rounds += 1
        # Ranks that were told to end have compared already, and a rank that failed has taken part
        # in that by this very call.
        go_on = go_on and self._agree_to_go_on(failed=bool(self.failures))
        if runner is not None and not self.failures:
            runner.close(calls.release and go_on)
        return go_on

    def _look(self, wrong: torch.Tensor, calls: Round, made: list[Step], first: int) -> None:
        """Record the calls of a round whose results are wrong on this rank."""
        counts = wrong.sum(1).tolist()
        for step, offset in zip(made, calls.numbers, strict=False):
            for i, slot in enumerate(step.slots):
                if counts[offset + i]:
                    where = "in a graph" if step.graph is not None else "alone"
                    what = f"{calls.slots[slot].case.label}, {where}: {counts[offset + i]} wrong elements"
                    self.failures.append(Failure(self.rank, first + offset + i, "wrong", what))

    def _count(self, step: Step, slots: list[Slot]) -> None:
        for i in step.slots:
            case = slots[i].case
            self.counts[case.operator, case.impl] += 1
            self.backwards += case.backward
        self.replays += len(step.slots) if step.graph is not None else 0
        self.done += len(step.slots)

    def _agree_to_go_on(self, failed: bool) -> bool:
        """Whether no rank has failed, none was interrupted, and rank 0 finds that neither time nor
        calls are spent. Collective.
        """
        seconds = time.monotonic() - self.started
        spent = 0.0
        if self.rank == 0:
            parts = [seconds / self.plan.seconds if self.plan.seconds else 0.0]
            parts.append(self.done / self.plan.calls if self.plan.calls else 0.0)
            spent = max(parts)
            self._show(spent)
        flags = torch.tensor([float(failed), float(self.interrupted), float(spent >= 1)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control)
        self.interrupted |= bool(flags[1])
        return not flags.any()

    def _show(self, spent: float) -> None:
        """Tell the command how much of the soak is done, in hundredths for each rank."""
        hundredths = min(100, int(100 * spent))
        if hundredths > self.shown:
            with (self.folder / "rank-0").open("ab") as file:
                file.write(b"." * (hundredths - self.shown) * dist.get_world_size())
            self.shown = hundredths

    # Around it

    def _own_groups(self) -> list[dist.ProcessGroup | None]:
        return [
            group
            for group, ranks in zip(self.groups, self.members, strict=True)
            if self.rank in ranks
        ]

    @contextlib.contextmanager
    def _late(self, number: int) -> Iterator[None]:
        """On the CPU backend, delays and other orders of puts, of this rank's own."""
        if self.backend == "cuda":
            yield
            return
        faults = Faults(
            seed=1000 * number + self.rank, max_delay_s=_CPU_DELAY_S, reorder_puts=number % 2 == 1
        )
        with inject(faults):
            yield

    @contextlib.contextmanager
    def _stopped_by_interrupt(self) -> Iterator[None]:
        """Ctrl-C ends the soak at the next look, with the report."""

        def stop(*_: object) -> None:
            self.interrupted = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class _Round:
    """The prepared cases of a round, of those groups that this rank is in, and the graphs of some
    of them.
    """

    def __init__(self, soak: _Soak, calls: Round, wrong: torch.Tensor) -> None:
        self.soak, self.calls, self.wrong = soak, calls, wrong
        self.prepared: dict[int, Prepared] = {}
        for i, slot in enumerate(calls.slots):
            if soak.rank in soak.members[slot.group]:
                seeds = [_VARIANTS * i + variant for variant in range(_VARIANTS)]
                self.prepared[i] = slot.case.prepare(soak.groups[slot.group], seeds)
        self.graphs: list[tuple[Any, torch.Tensor]] = []  # with the numbers of wrong elements
        self._synchronize_device()

    def make(self, step: Step, offset: int, delays: random.Random) -> None:
        """Make a step's calls, and enqueue the comparison of their results."""
        slot = self.calls.slots[step.slots[0]]
        if self.calls.graphs and len(self.graphs) == 0 and offset >= len(self.calls.slots):
            self._capture(delays)
        if step.slots[0] not in self.prepared:
            return
        if delays.random() < _HOST_SLEEPS:
            time.sleep(delays.uniform(0, _HOST_SLEEP_S))
        if self.soak.backend == "cpu":
            self._run(step, offset)
            return
        with torch.cuda.stream(self.soak.streams[slot.stream]):
            if delays.random() < _DEVICE_SLEEPS:
                torch.cuda._sleep(delays.randrange(_DEVICE_SLEEP_CYCLES))
            # Whoever replays a graph orders it; NCCL's communicators must not run side by side.
            if step.graph is not None or slot.case.impl == "unfused":
                with self._alone(slot.stream):
                    self._run(step, offset)
            else:
                self._run(step, offset)

    def _run(self, step: Step, offset: int) -> None:
        if step.graph is None:
            for i, (slot, variant) in enumerate(zip(step.slots, step.variants, strict=True)):
                self._call(slot, variant, self.wrong[offset + i])
        else:
            graph, wrong = self.graphs[step.graph]
            graph.replay()
            self.wrong[offset : offset + len(step.slots)] = wrong

    def _call(self, slot: int, variant: int, wrong: torch.Tensor) -> None:
        """Make one call, store its numbers of wrong elements, and destroy its results."""
        prepared = self.prepared[slot]
        prepared.load(variant)
        results = prepared.run()
        prepared.count_wrong(results, variant, wrong)
        if self.calls.slots[slot].case.poisonable:
            for result in results:
                result.fill_(float("nan"))

    def _capture(self, delays: random.Random) -> None:
        """Make the round's graphs. Every slot in them has been called before."""
        self._synchronize_device()
        for step in self.calls.graphs:
            wrong = torch.zeros(
                len(step.slots), _MOST_RESULTS, dtype=torch.int64, device=self.wrong.device
            )
            if step.slots[0] not in self.prepared:
                self.graphs.append((None, wrong))
                continue
            graph = torch.cuda.CUDAGraph()
            stream = self.soak.streams[self.calls.slots[step.slots[0]].stream]
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for i, (slot, variant) in enumerate(zip(step.slots, step.variants, strict=True)):
                    if delays.random() < _SLEEPS_IN_GRAPHS:
                        torch.cuda._sleep(delays.randrange(_SLEEP_IN_GRAPH_CYCLES))
                    self._call(slot, variant, wrong[i])
            self.graphs.append((graph, wrong))
        self._synchronize_device()

    @contextlib.contextmanager
    def _alone(self, stream: int) -> Iterator[None]:
        """Order what runs within after all that other streams have been given, and before what they
        will be given.
        """
        others = [other for other in self.soak.streams if other is not self.soak.streams[stream]]
        for other in others:
            self.soak.streams[stream].wait_stream(other)
        yield
        for other in others:
            other.wait_stream(self.soak.streams[stream])

    def synchronize(self) -> None:
        """Wait for every call of the round, and raise what any group has found."""
        for group in self.soak._own_groups():
            interlace.synchronize(group)

    def close(self, release: bool) -> None:
        """Free the round's graphs and tensors; with ``release`` also all workspaces of the groups.
        Collective.
        """
        self.graphs.clear()
        self.prepared.clear()
        if release:
            for group in self.soak._own_groups():
                group_of(group).release()

    def _synchronize_device(self) -> None:
        if self.soak.backend == "cuda":
            torch.cuda.synchronize(self.soak.device)


def _memberships(ranks: int) -> list[tuple[int, ...]]:
    """The ranks of each group: all; all again; and all but the first, where that leaves several."""
    groups = [tuple(range(ranks)), tuple(range(ranks))]
    return [*groups, tuple(range(1, ranks))] if ranks > 2 else groups


__all__ = ["ROUND_CALLS", "Failure", "Plan", "make_round", "run_rank"]
