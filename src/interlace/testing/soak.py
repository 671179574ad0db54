"""``interlace soak`` on each rank: random calls, and every result checked on the device.

The calls come in *rounds*. A round prepares some cases, captures some of them in CUDA graphs, and
then makes calls of them in random order; the host looks at the results when the round ends. Rounds
and calls are a function of the seed alone, and so the same on every rank; delays differ by rank.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm import Faults, group_of, inject
from interlace.errors import InterlaceError
from interlace.testing.cases import Prepared
from interlace.testing.cases.base import no_value
from interlace.testing.soak_rounds import (
    ROUND_CALLS,
    STREAMS,
    VARIANTS,
    Round,
    Slot,
    SoakPlan,
    SoakStep,
    make_round,
)

MOST_RESULTS = 8
"""Most results of one call."""

# Delays of a rank: probability, and longest duration.
_HOST_SLEEPS, _HOST_SLEEP_S = 0.02, 0.002
_DEVICE_SLEEPS, _DEVICE_SLEEP_CYCLES = 0.05, 1_000_000
_SLEEPS_IN_GRAPHS, _SLEEP_IN_GRAPH_CYCLES = 0.2, 100_000
# Probability that a rank returns its free memory to the driver before a call, so that later results
# lie in other pages at the same addresses.
_RETURNS = 0.002
# Calls after which the ranks agree to go on or to end.
_CALLS_BETWEEN_LOOKS = {"cpu": 6, "cuda": 500}
# Time beyond the deadline in which peers end their own waits, before the ranks compare results.
_GRACE_S = 120.0
# Longest delay of a put on the CPU backend.
_CPU_DELAY_S = 0.0002


@dataclasses.dataclass(frozen=True)
class Participant:
    """A rank of a soak, and its groups and streams.

    Attributes:
        rank: The rank.
        backend: ``"cpu"`` or ``"cuda"``.
        device: Its device.
        groups: All process groups of the soak; None for the default one.
        members: The ranks of each group.
        streams: CUDA streams of the calls; none on the CPU.
        spanning: Indices of the groups whose ranks are on several nodes.
    """

    rank: int
    backend: str
    device: torch.device
    groups: Sequence[dist.ProcessGroup | None]
    members: Sequence[tuple[int, ...]]
    streams: Sequence[torch.cuda.Stream]
    spanning: Sequence[int] = ()

    def own_groups(self) -> list[dist.ProcessGroup | None]:
        """Return the groups that this rank is a member of."""
        return [
            group
            for group, ranks in zip(self.groups, self.members, strict=True)
            if self.rank in ranks
        ]


class PreparedRound:
    """The prepared cases of a round, for the groups of this rank, and graphs of some of them.

    Args:
        participant: This rank.
        calls: The round.
        wrong: int64 ``[calls, MOST_RESULTS]``: the numbers of wrong elements; filled by calls.
    """

    def __init__(self, participant: Participant, calls: Round, wrong: torch.Tensor) -> None:
        self.participant, self.calls, self.wrong = participant, calls, wrong
        self.prepared: dict[int, Prepared] = {}
        for i, slot in enumerate(calls.slots):
            if participant.rank in participant.members[slot.group]:
                seeds = [VARIANTS * i + variant for variant in range(VARIANTS)]
                group = participant.groups[slot.group]
                self.prepared[i] = slot.case.prepare(group, seeds, slot.layouts)
        # Graphs, each with the tensor that it writes its numbers of wrong elements into.
        self.graphs: list[tuple[Any, torch.Tensor]] = []
        self._synchronize_device()

    def make(self, step: SoakStep, offset: int, delays: random.Random) -> None:
        """Make a step's calls, and enqueue the comparison of their results.

        Args:
            step: The step.
            offset: Number of its first call within the round.
            delays: Source of this rank's random delays.
        """
        slot = self.calls.slots[step.slots[0]]
        if self.calls.graphs and len(self.graphs) == 0 and offset >= len(self.calls.slots):
            self._capture(delays)
        if step.slots[0] not in self.prepared:
            return
        if delays.random() < _HOST_SLEEPS:
            time.sleep(delays.uniform(0, _HOST_SLEEP_S))
        if self.participant.backend == "cpu":
            self._run(step, offset)
            return
        if delays.random() < _RETURNS:
            torch.cuda.empty_cache()
        with torch.cuda.stream(self.participant.streams[slot.stream]):
            if delays.random() < _DEVICE_SLEEPS:
                torch.cuda._sleep(delays.randrange(_DEVICE_SLEEP_CYCLES))
            # A group orders its calls on several streams, but not those of a replayed graph, which
            # whoever replays it must order. Kernels of several NCCL communicators must not run at
            # the same time; slices between nodes have one, too.
            uses_nccl = slot.case.impl == "unfused" or slot.group in self.participant.spanning
            if step.graph is not None or uses_nccl:
                with self._alone(slot.stream):
                    self._run(step, offset)
            else:
                self._run(step, offset)

    def _run(self, step: SoakStep, offset: int) -> None:
        """Make a step's calls, or replay its graph."""
        if step.graph is None:
            for i, (slot, variant) in enumerate(zip(step.slots, step.variants, strict=True)):
                self._call(slot, variant, self.wrong[offset + i])
        else:
            graph, wrong = self.graphs[step.graph]
            graph.replay()
            self.wrong[offset : offset + len(step.slots)] = wrong

    def _call(self, slot: int, variant: int, wrong: torch.Tensor) -> None:
        """Make one call, store its numbers of wrong elements, and overwrite its results."""
        prepared = self.prepared[slot]
        prepared.load(variant)
        results = prepared.run()
        prepared.count_wrong(results, variant, wrong)
        # A later call that returned this memory without writing it would be seen.
        if self.calls.slots[slot].case.poisonable:
            for result in results:
                result.fill_(no_value(result.dtype))

    def _capture(self, delays: random.Random) -> None:
        """Capture the round's graphs. Every slot in them has been called before."""
        self._synchronize_device()
        for step in self.calls.graphs:
            wrong = torch.zeros(
                len(step.slots), MOST_RESULTS, dtype=torch.int64, device=self.wrong.device
            )
            if step.slots[0] not in self.prepared:
                self.graphs.append((None, wrong))
                continue
            graph = torch.cuda.CUDAGraph()
            stream = self.participant.streams[self.calls.slots[step.slots[0]].stream]
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for i, (slot, variant) in enumerate(zip(step.slots, step.variants, strict=True)):
                    if delays.random() < _SLEEPS_IN_GRAPHS:
                        torch.cuda._sleep(delays.randrange(_SLEEP_IN_GRAPH_CYCLES))
                    self._call(slot, variant, wrong[i])
            self.graphs.append((graph, wrong))
        self._synchronize_device()

    @contextlib.contextmanager
    def _alone(self, stream: int) -> Iterator[None]:
        """Order the work of this block after earlier work of all streams, and before later work."""
        chosen = self.participant.streams[stream]
        peers = [peer for peer in self.participant.streams if peer is not chosen]
        for peer in peers:
            chosen.wait_stream(peer)
        yield
        for peer in peers:
            peer.wait_stream(chosen)

    def synchronize(self) -> None:
        """Wait for every call of the round.

        Raises:
            InterlaceError: a call of one of the groups has failed.
        """
        for group in self.participant.own_groups():
            interlace.synchronize(group)

    def close(self, release: bool) -> None:
        """Free the round's graphs and tensors. Collective.

        Args:
            release: True to release all workspaces of the groups, too.
        """
        self.graphs.clear()
        self.prepared.clear()
        if release:
            for group in self.participant.own_groups():
                group_of(group).release()

    def _synchronize_device(self) -> None:
        if self.participant.backend == "cuda":
            torch.cuda.synchronize(self.participant.device)


@dataclasses.dataclass
class SoakFailure:
    """A call that failed on a rank.

    Attributes:
        rank: The rank.
        call: Number of the call; for an error, number of the call during which it was noticed.
        kind: ``"wrong"``, ``"timeout"`` or ``"error"``.
        what: The call with its number of wrong elements, or the error.
    """

    rank: int
    call: int
    kind: str
    what: str


def run_rank(folder: str, plan: SoakPlan) -> dict[str, Any]:
    """Run the plan on this rank. Collective over the default process group.

    Args:
        folder: Folder in which progress is written, as :func:`interlace.cli.ranks.advance` does.
        plan: The plan, the same on every rank.

    Returns:
        The report, the same on every rank, for JSON: numbers of calls, by operator and
            implementation, and the failures.
    """
    return _Soak(Path(folder), plan).run()


class _Soak:
    """One rank's part of a soak."""

    def __init__(self, folder: Path, plan: SoakPlan) -> None:
        self.folder, self.plan = folder, plan
        self.rank = dist.get_rank()
        self.device = group_of().device
        self.backend = group_of().backend
        nodes = group_of().members.node_of_rank
        self.members = _memberships(dist.get_world_size(), nodes)
        self.spanning = [
            i
            for i, ranks in enumerate(self.members)
            if nodes and len({nodes[rank] for rank in ranks}) > 1
        ]
        streams: list[torch.cuda.Stream] = []
        if self.backend == "cuda":
            streams = [torch.cuda.Stream(self.device) for _ in range(STREAMS)]
        self.participant = Participant(
            self.rank,
            self.backend,
            self.device,
            [None, *(dist.new_group(ranks) for ranks in self.members[1:])],
            self.members,
            streams,
            self.spanning,
        )
        # The groups under test may break. The ranks agree to go on or to end over a group that is
        # not one of them.
        self.control = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=plan.deadline_s + _GRACE_S)
        )
        self.deadline_s = group_of().deadline_s
        for group in self.participant.own_groups():
            interlace.set_deadline(plan.deadline_s, group)
        self.started = time.monotonic()
        self.interrupted = False
        self.done = self.shown = 0
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.replays = self.backwards = self.rounds = 0
        self.failures: list[SoakFailure] = []

    def run(self) -> dict[str, Any]:
        """Make all rounds, and return the report."""
        number = self.plan.start // ROUND_CALLS[self.backend]
        with on_interrupt(self._stop):
            while self._run_round(number):
                number += 1
        # The process may go on to use the default group.
        interlace.set_deadline(self.deadline_s)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            gathered, [dataclasses.asdict(failure) for failure in self.failures], self.control
        )
        failures = sorted(
            (failure for failures_of_rank in gathered for failure in failures_of_rank),
            key=lambda failure: (failure["call"], failure["rank"]),
        )
        return self._report(failures)

    def _report(self, failures: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the report, with all ranks' failures."""

        def count_calls(kind: str) -> int:
            return len({failure["call"] for failure in failures if failure["kind"] == kind})

        by_operator: dict[str, dict[str, int]] = {}
        for (operator, impl), count in sorted(self.counts.items()):
            by_operator.setdefault(operator, {})[impl] = count
        return {
            "backend": self.backend,
            "world_size": dist.get_world_size(),
            "nodes": group_of().nodes,
            "groups": [list(ranks) for ranks in self.members],
            "seed": self.plan.seed,
            "start": self.plan.start,
            "round_calls": ROUND_CALLS[self.backend],
            "operators": list(self.plan.operators),
            "calls": self.done,
            "wrong": count_calls("wrong"),
            "timeouts": count_calls("timeout"),
            "errors": count_calls("error"),
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
        """Make one round, and tell if another one follows. Collective."""
        sizes = [len(ranks) for ranks in self.members]
        calls = make_round(number, self.plan, self.backend, sizes, self.spanning)
        first = number * ROUND_CALLS[self.backend]
        wrong = torch.zeros(
            ROUND_CALLS[self.backend], MOST_RESULTS, dtype=torch.int64, device=self.device
        )
        go_on, at = True, first
        made: list[SoakStep] = []
        delays = random.Random(f"{self.plan.seed} {number} {self.rank}")
        runner: PreparedRound | None = None
        try:
            with self._late(number):
                runner = PreparedRound(self.participant, calls, wrong)
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
            self.failures.append(
                SoakFailure(self.rank, at, kind, f"{type(error).__name__}: {error}")
            )
        # After an error the results are not complete: wrong ones would say nothing.
        if not self.failures:
            self._look(wrong, calls, made, first)
        self.rounds += 1
        # Ranks that agreed to end within the round do not agree again. A rank that failed within it
        # takes part in that agreement here.
        go_on = go_on and self._agree_to_go_on(failed=bool(self.failures))
        if runner is not None and not self.failures:
            runner.close(calls.release and go_on)
        return go_on

    def _look(self, wrong: torch.Tensor, calls: Round, made: list[SoakStep], first: int) -> None:
        """Record the calls of a round whose results are wrong on this rank."""
        counts = wrong.sum(1).tolist()
        for step, offset in zip(made, calls.numbers, strict=False):
            for i, slot in enumerate(step.slots):
                if counts[offset + i]:
                    label = calls.slots[slot].case.label
                    mode = "in a graph" if step.graph is not None else "alone"
                    text = f"{label}, {mode}: {counts[offset + i]} wrong elements"
                    self.failures.append(SoakFailure(self.rank, first + offset + i, "wrong", text))

    def _count(self, step: SoakStep, slots: list[Slot]) -> None:
        """Count a step's calls for the report."""
        for i in step.slots:
            case = slots[i].case
            self.counts[case.operator, case.impl] += 1
            self.backwards += case.backward
        self.replays += len(step.slots) if step.graph is not None else 0
        self.done += len(step.slots)

    def _agree_to_go_on(self, failed: bool) -> bool:
        """Tell if the soak goes on. Collective.

        It does if no rank has failed, none was interrupted, and rank 0 finds that neither time nor
        calls are used up.
        """
        seconds = time.monotonic() - self.started
        spent = 0.0
        if self.rank == 0:
            limits = (seconds, self.plan.seconds), (self.done, self.plan.calls)
            spent = max(used / limit if limit else 0.0 for used, limit in limits)
            self._show(spent)
        flags = torch.tensor([float(failed), float(self.interrupted), float(spent >= 1)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control)
        self.interrupted |= bool(flags[1])
        return not flags.any()

    def _show(self, spent: float) -> None:
        """Tell the command the share of the soak that is done: one byte per rank and hundredth."""
        hundredths = min(100, int(100 * spent))
        if hundredths > self.shown:
            with (self.folder / "rank-0").open("ab") as file:
                file.write(b"." * (hundredths - self.shown) * dist.get_world_size())
            self.shown = hundredths

    # Delays and interrupts

    @contextlib.contextmanager
    def _late(self, number: int) -> Iterator[None]:
        """Delay and reorder this rank's puts on the CPU backend, within a block."""
        if self.backend == "cuda":
            yield
            return
        faults = Faults(
            seed=1000 * number + self.rank, max_delay_s=_CPU_DELAY_S, reorder_puts=number % 2 == 1
        )
        with inject(faults):
            yield

    def _stop(self, *_: object) -> None:
        """Let Ctrl-C end the soak at the ranks' next agreement, with a report."""
        self.interrupted = True


@contextlib.contextmanager
def on_interrupt(handler: Callable[..., object]) -> Iterator[None]:
    """Let Ctrl-C call a handler of signals, within a block."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _memberships(ranks: int, node_of_rank: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of each group: twice all ranks, and all but the first; of several nodes,
    twice all ranks, and those of each node.

    Groups of one rank are left out.
    """
    groups = [tuple(range(ranks)), tuple(range(ranks))]
    if node_of_rank:
        parts = [
            tuple(rank for rank, its in enumerate(node_of_rank) if its == node)
            for node in sorted(set(node_of_rank))
        ]
    else:
        parts = [tuple(range(1, ranks))]
    return [*groups, *(part for part in parts if len(part) > 1)]


__all__ = [
    "ROUND_CALLS",
    "Round",
    "SoakFailure",
    "SoakPlan",
    "make_round",
    "on_interrupt",
    "run_rank",
]
