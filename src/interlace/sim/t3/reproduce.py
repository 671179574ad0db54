"""The published figures of T3, and what this model finds with one set of parameters for all workloads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from interlace.sim.t3.machine import T3Machine, load_t3_machine
from interlace.sim.t3.models import SUBLAYERS, SubLayerName, load_t3_model
from interlace.sim.t3.run import CONFIGURATIONS, SubLayer, simulate

SMALL, LARGE = ("mega-gpt-2", "t-nlg"), ("palm", "mt-nlg")
"""The models of the paper's main figures, and those of its 29 %."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A sub-layer by all configurations, without the single events."""

    model: str
    ranks: int
    sublayer: SubLayerName
    total_ns: dict[str, int]
    reduce_scatter_ns: dict[str, int]
    reads: dict[str, float]
    writes: dict[str, float]
    product_reads: dict[str, float]
    traffic: dict[str, float]

    def speed_up(self, configuration: str) -> float:
        """Against the sequential sub-layer."""
        return self.total_ns["sequential"] / self.total_ns[configuration]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published figure and ours, both in ``unit``.

    Attributes:
        note: what has to be known to judge it.
    """

    name: str
    published: float
    ours: float
    tolerance: float
    unit: str
    note: str = ""

    @property
    def difference(self) -> float:
        return self.ours - self.published

    @property
    def met(self) -> bool:
        return abs(self.difference) <= self.tolerance + 1e-9


@dataclasses.dataclass(frozen=True)
class Study:
    """What ``reproduce t3`` found."""

    cases: list[Case]
    figures: list[Figure]
    assumptions: list[tuple[str, float | Sequence[float], str, str]]

    def to_json(self) -> dict[str, Any]:
        return {
            "figures": [{**dataclasses.asdict(f), "difference": f.difference, "met": f.met} for f in self.figures],
            "cases": [dataclasses.asdict(case) for case in self.cases],
            "assumptions": [
                {"key": key, "value": value, "confidence": confidence, "source": source}
                for key, value, confidence, source in self.assumptions
            ],
        }


def study(machine: T3Machine | None = None, models: Sequence[str] = SMALL + LARGE) -> Study:
    """Run all sub-layers of some models at their degrees, and compare. Half a minute to a minute."""
    machine = machine or load_t3_machine()
    cases = [case for name in models for case in _cases(machine, name)]
    return Study(cases, figures(cases), assumptions(machine))


def _cases(machine: T3Machine, name: str) -> Iterator[Case]:
    model = load_t3_model(name)
    for ranks in map(int, model.tensor_parallel.value):
        done: dict[int, dict[str, SubLayer]] = {}
        for sublayer in SUBLAYERS:  # FC-1 backward is the same product as FC-2 forward
            product = model.product(sublayer, ranks)
            if product.depth not in done:
                done[product.depth] = {which: simulate(machine, product, ranks, which) for which in CONFIGURATIONS}
            yield _case(name, ranks, sublayer, done[product.depth])


def _case(model: str, ranks: int, sublayer: SubLayerName, results: dict[str, SubLayer]) -> Case:
    both = ("product", "reduce-scatter")
    return Case(
        model,
        ranks,
        sublayer,
        total_ns={name: result.total_ns for name, result in results.items()},
        reduce_scatter_ns={name: results[name].parts[1].time_ns for name in ("sequential", "ideal-nmc")},
        reads={name: result.moved("reduce-scatter", "read") for name, result in results.items()},
        writes={name: sum(result.moved(cause, "write", "update") for cause in both) for name, result in results.items()},
        product_reads={name: result.moved("product", "read") for name, result in results.items()},
        traffic={name: sum(result.memory_bytes.values()) for name, result in results.items()},
    )


def figures(cases: Sequence[Case]) -> list[Figure]:
    """Every published figure that the cases are enough for."""
    small = [case for case in cases if case.model in SMALL]
    large = [case for case in cases if case.model in LARGE]
    found: list[Figure] = []
    if small:
        for name, which, mean, most in (("T3-MCA", "t3-mca", 30, 47), ("T3", "t3", 20, 39), ("ideal overlap", "ideal", 35, 50)):
            gains = [case.speed_up(which) for case in small]
            found.append(Figure(f"{name}, faster, geomean", mean, 100 * (_geomean(gains) - 1), 3, "%"))
            found.append(Figure(f"{name}, faster, maximum", most, 100 * (max(gains) - 1), 5, "%"))
    if large:
        gains = [case.speed_up("t3-mca") for case in large]
        found.append(Figure("T3-MCA, PALM and MT-NLG, geomean", 29, 100 * (_geomean(gains) - 1), 3, "%"))
    if small:
        less = [_ratio(case, lambda c: c.traffic, "t3-mca", "sequential") for case in small]
        found.append(Figure("DRAM traffic, geomean", -22, 100 * (_geomean(less) - 1), 3, "%"))
        found.append(Figure("DRAM traffic, most saved", -36, 100 * (min(less) - 1), 5, "%"))
    for ranks, fewer in ((8, 2.5), (16, 2.2)):
        mine = [_ratio(case, lambda c: c.reads, "sequential", "t3-mca") for case in small if case.ranks == ranks]
        if mine:
            found.append(Figure(f"reduce-scatter reads, fewer, TP {ranks}", fewer, _geomean(mine), 0.02 * fewer, "x", IDENTITY))
    if small:
        writes = [_ratio(case, lambda c: c.writes, "sequential", "t3-mca") for case in small]
        found.append(Figure("writes of product and reduce-scatter, fewer", 10, 100 * (_geomean(writes) - 1), 2, "%", IDENTITY))
        reads = [_ratio(case, lambda c: c.product_reads, "sequential", "t3-mca") for case in small]
        found.append(Figure("product reads, fewer", 1.56, _geomean(reads), 0.15, "x", "the tile order was chosen by this"))
        for units, gain, note in ((8, 1.18, "fitted: copy_bytes_per_s"), (16, 1.49, "")):
            split = _geomean([case.speed_up(f"split-{units}") for case in small])
            found.append(Figure(f"{units} of 80 compute units for the all-reduce", gain, split, 0.08, "x", note))
    for ranks, percent in ((8, 7), (16, 3)):
        near = [c.reduce_scatter_ns["sequential"] / c.reduce_scatter_ns["ideal-nmc"] for c in small if c.ranks == ranks]
        if near:
            gain = 100 * (_geomean(near) - 1)
            found.append(
                Figure(f"near-memory compute alone, TP {ranks}", percent, gain, 1, "%", "the link's reading was chosen by this")
            )
    return found


IDENTITY = "follows from the mechanism"


def assumptions(machine: T3Machine) -> list[tuple[str, float | Sequence[float], str, str]]:
    """Every value of the machine: key, value, confidence, source."""
    found = []
    for part in ("gpu", "memory", "network", "tracker", "dma", "arbitration"):
        values = getattr(machine, part)
        for name in type(values).model_fields:
            given = getattr(values, name)
            found.append((f"{part}.{name}", given.value, given.confidence, given.source))
    return found


def _ratio(case: Case, which: Callable[[Case], dict[str, float]], above: str, below: str) -> float:
    values = which(case)
    return values[above] / values[below]


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
