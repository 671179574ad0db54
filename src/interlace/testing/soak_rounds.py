"""Rounds of a soak: its cases, graphs and calls, drawn by the seed alone."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Collection, Sequence

from interlace.testing.cases import Case, draw_case

ROUND_CALLS = {"cpu": 24, "cuda": 50_000}
"""Calls per round, by backend.

A soak can begin at any round, so a failure is repeated without the rounds before it.
"""

VARIANTS = 3
"""Variants of the inputs of each case."""

STREAMS = 3
"""CUDA streams that calls run on."""

_CASES = {"cpu": 6, "cuda": 32}  # per round
_GRAPHS = 10
_MOST_CALLS_IN_GRAPH = 12
_REPLAYS = 0.4  # of the steps
_OTHER_LAYOUTS = 0.3  # of the cases


@dataclasses.dataclass(frozen=True)
class SoakPlan:
    """The plan of a soak, the same on every rank.

    Attributes:
        seed: Seed of cases and calls.
        start: Number of the first call; a multiple of the calls per round.
        calls: Most calls to make; 0 for no limit.
        seconds: Time after which to end, in s; 0 for no limit.
        operators: Operators to call; empty for all.
        deadline_s: Deadline of the groups, in s.
    """

    seed: int
    start: int = 0
    calls: int = 0
    seconds: float = 0.0
    operators: tuple[str, ...] = ()
    deadline_s: float = 60.0


@dataclasses.dataclass(frozen=True)
class Slot:
    """A case that is prepared once per round.

    Attributes:
        case: The case.
        group: Index of the group that calls it.
        stream: Index of the stream that its calls run on.
        layouts: The seed of its inputs' layouts; None for those of new tensors.
    """

    case: Case
    group: int
    stream: int
    layouts: int | None


@dataclasses.dataclass(frozen=True)
class SoakStep:
    """One call of a slot, or the replay of a graph, which makes several calls.

    Attributes:
        slots: Slot of each call.
        variants: Variant of the inputs of each call.
        graph: Index of the graph; None for an ordinary call.
    """

    slots: tuple[int, ...]
    variants: tuple[int, ...]
    graph: int | None = None


@dataclasses.dataclass(frozen=True)
class Round:
    """A round of a soak.

    Attributes:
        slots: The prepared cases.
        graphs: The calls of each graph.
        steps: Calls and replays, in order.
        release: True if the groups release their workspaces at the round's end.
    """

    slots: list[Slot]
    graphs: list[SoakStep]
    steps: list[SoakStep]
    release: bool

    @property
    def numbers(self) -> list[int]:
        """Numbers of the steps' first calls within the round, one per step."""
        ends = itertools.accumulate(len(step.slots) for step in self.steps)
        return [0, *ends][:-1]


def make_round(
    number: int,
    plan: SoakPlan,
    backend: str,
    group_sizes: Sequence[int],
    spanning: Collection[int] = (),
) -> Round:
    """Draw round ``number`` of a soak: the same on every rank, whatever came before.

    Args:
        number: Number of the round, from 0.
        plan: The plan.
        backend: ``"cpu"`` or ``"cuda"``.
        group_sizes: Number of ranks of each group.
        spanning: Indices of the groups whose ranks are on several nodes.
    """
    source = random.Random(f"{plan.seed} {number}")
    slots = []
    for _ in range(_CASES[backend]):
        group = source.randrange(len(group_sizes))
        case = draw_case(
            group_sizes[group],
            source,
            plan.operators,
            large=backend == "cuda",
            spans_nodes=group in spanning,
        )
        stream = source.randrange(STREAMS) if backend == "cuda" else 0
        layouts = source.randrange(1 << 16) if source.random() < _OTHER_LAYOUTS else None
        slots.append(Slot(case, group, stream, layouts))
    graphs = _draw_graphs(slots, source) if backend == "cuda" else []
    # Every slot is called once before graphs are captured: a first call allocates memory, which is
    # not possible during capture.
    steps = [SoakStep((i,), (0,)) for i in range(len(slots))]
    count = len(slots)
    while count < ROUND_CALLS[backend]:
        step = SoakStep((source.randrange(len(slots)),), (source.randrange(VARIANTS),))
        if graphs and source.random() < _REPLAYS:
            replay = source.choice(graphs)
            if count + len(replay.slots) <= ROUND_CALLS[backend]:
                step = replay
        steps.append(step)
        count += len(step.slots)
    # Memory that graphs have captured is used again only after the group has released it, so rounds
    # with graphs release more often.
    return Round(slots, graphs, steps, release=source.random() < (0.7 if graphs else 0.2))


def _draw_graphs(slots: list[Slot], source: random.Random) -> list[SoakStep]:
    """Draw graphs of random calls; the calls of a graph are of one group and stream."""
    capturable: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for i, slot in enumerate(slots):
        if slot.case.capturable:
            capturable[slot.group, slot.stream].append(i)
    graphs = []
    for number in range(_GRAPHS if capturable else 0):
        candidates = source.choice(list(capturable.values()))
        chosen = source.choices(candidates, k=source.randint(1, _MOST_CALLS_IN_GRAPH))
        variants = tuple(source.randrange(VARIANTS) for _ in chosen)
        graphs.append(SoakStep(tuple(chosen), variants, number))
    return graphs
