"""The published figures of T3, and this model's, with one set of parameters for all workloads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from interlace_sim.sweeps import Progress, map_processes
from interlace_sim.t3 import endtoend
from interlace_sim.t3.machine import T3Machine, load_t3_machine
from interlace_sim.t3.models import SUBLAYERS, SubLayerName, load_t3_model
from interlace_sim.t3.product import Product
from interlace_sim.t3.run import CONFIGURATIONS, simulate

SMALL, LARGE = ("mega-gpt-2", "t-nlg"), ("palm", "mt-nlg")
"""The models of the paper's main figures, and those of its 29 %."""
LARGE_CONFIGURATIONS = ("sequential", "t3-mca")
"""Configurations that the figures of the large models come from."""
MODELS = (*SMALL, "gpt-3", *LARGE)


@dataclasses.dataclass(frozen=True)
class Case:
    """A sub-layer in the configurations that were simulated, without the single events."""

    model: str
    ranks: int
    sublayer: SubLayerName
    depth: int
    total_ns: dict[str, int]
    part_ns: dict[str, list[int]]
    reduce_scatter_ns: dict[str, int]
    reads: dict[str, float]
    writes: dict[str, float]
    product_reads: dict[str, float]
    traffic: dict[str, float]

    def speed_up(self, configuration: str) -> float:
        """Against the sequential sub-layer."""
        return self.total_ns["sequential"] / self.total_ns[configuration]

    @property
    def both_speed_up(self) -> float:
        """Speed-up if product and all-reduce, as independent work, overlapped perfectly."""
        product, *all_reduce = self.part_ns["sequential"]
        return self.total_ns["sequential"] / max(product, sum(all_reduce))

    def slower(self, configuration: str, *, product: bool) -> float:
        """Return the time of product or all-reduce on some compute units over that on all."""
        pick = slice(0, 1) if product else slice(1, None)
        return sum(self.part_ns[configuration][pick]) / sum(self.part_ns["sequential"][pick])


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published figure and ours, both in ``unit``.

    Attributes:
        published: Figure of the paper.
        ours: Figure of this model.
        tolerance: Largest difference at which the figure is met.
        unit: ``"%"`` or ``"x"``.
        note: Anything that is needed to judge the figure.
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
    """All cases of ``study t3``, the figures from them, and the machine's assumptions."""

    cases: list[Case]
    figures: list[Figure]
    assumptions: list[tuple[str, float | Sequence[float], str, str]]

    def to_json(self) -> dict[str, Any]:
        return {
            "figures": [
                {**dataclasses.asdict(f), "difference": f.difference, "met": f.met}
                for f in self.figures
            ],
            "cases": [dataclasses.asdict(case) for case in self.cases],
            "assumptions": [
                {"key": key, "value": value, "confidence": confidence, "source": source}
                for key, value, confidence, source in self.assumptions
            ],
        }


def study(
    machine: T3Machine | None = None,
    models: Sequence[str] = MODELS,
    *,
    tokens: int | None = None,
    every_case: bool = True,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Study:
    """Run all sub-layers of some models at their degrees, and compare them with the paper.

    It takes about a minute of a processor's time.

    Args:
        machine: The machine; the paper's by default.
        models: Presets of models.
        tokens: Tokens of every model instead of its own; quicker, but not the paper's comparison.
        every_case: Whether to simulate models and configurations that no figure needs as well.
        workers: Number of processes; None is all processors, 1 runs in this process.
        progress: Called after every product.
    """
    machine = machine or load_t3_machine()
    wanted = [
        (name, int(ranks), sublayer, model.product(sublayer, int(ranks), tokens))
        for name, model in ((name, load_t3_model(name)) for name in models)
        if every_case or name in (*SMALL, *LARGE)
        for ranks in model.tensor_parallel.value
        for sublayer in SUBLAYERS
    ]
    # FC-1 backward has the sizes of FC-2 forward, so it is simulated once for both.
    different = {(name, ranks, product.depth): product for name, ranks, _, product in wanted}
    # The largest come first, so that no process is left alone with one of them in the end; those of
    # one degree stay together, since they share the simulated collectives.
    keys = sorted(different, key=lambda key: (-different[key].output_bytes, *key))
    few = () if every_case else LARGE
    runs = [
        (key[1], different[key], LARGE_CONFIGURATIONS if key[0] in few else CONFIGURATIONS)
        for key in keys
    ]
    simulated = map_processes(functools.partial(_case, machine), runs, workers, progress)
    cases = dict(zip(keys, simulated, strict=True))
    named = [
        dataclasses.replace(cases[name, ranks, product.depth], model=name, sublayer=sublayer)
        for name, ranks, sublayer, product in wanted
    ]
    return Study(named, figures(named) + _end_to_end(machine, named), assumptions(machine))


_PUBLISHED_LAYERS: tuple[tuple[endtoend.Phase, str, float, float], ...] = (
    ("training", "t3", 7, 9),
    ("training", "t3-mca", 10, 12),
    ("prompt", "t3", 9, 12),
    ("prompt", "t3-mca", 12, 15),
)
"""Phase, configuration, geometric mean and maximum in per cent."""


def _end_to_end(machine: T3Machine, cases: Sequence[Case]) -> list[Figure]:
    """Compare end-to-end gains in training and prompts, for the models of the main figures."""
    small = [case for case in cases if case.model in SMALL]
    if not small:
        return []
    note = f"{100 * endtoend.REST_SHARE:g} % of the time in what is not sliced"
    compared = []
    for phase, configuration, mean, maximum in _PUBLISHED_LAYERS:
        gains = []
        for model, ranks in dict.fromkeys((case.model, case.ranks) for case in small):
            # The cases have the times already, so no layer is simulated a second time.
            known = {
                case.depth: {**case.total_ns, "product": case.part_ns["sequential"][0]}
                for case in small
                if (case.model, case.ranks) == (model, ranks)
            }
            layer = endtoend.estimate(machine, load_t3_model(model), ranks, phase, known=known)
            gains.append(layer.speed_up(configuration))
        name = f"{configuration.upper()}, {phase}, end to end"
        compared += [
            Figure(f"{name}, geomean", mean, _percent(geometric_mean(gains)), 2, "%", note),
            Figure(f"{name}, maximum", maximum, _percent(max(gains)), 2, "%", note),
        ]
    return compared


def _case(machine: T3Machine, run: tuple[int, Product, Sequence[str]]) -> Case:
    """Simulate a product in some configurations; the caller fills in model and sub-layer."""
    ranks, product, configurations = run
    results = {name: simulate(machine, product, ranks, name) for name in configurations}
    both = ("product", "reduce_scatter")
    return Case(
        "",
        ranks,
        "op",
        depth=product.depth,
        total_ns={name: result.total_ns for name, result in results.items()},
        part_ns={name: [part.time_ns for part in result.parts] for name, result in results.items()},
        reduce_scatter_ns={
            name: results[name].parts[1].time_ns
            for name in ("sequential", "ideal-nmc")
            if name in results
        },
        reads={name: result.moved("reduce_scatter", "read") for name, result in results.items()},
        writes={
            name: sum(result.moved(cause, "write", "update") for cause in both)
            for name, result in results.items()
        },
        product_reads={name: result.moved("product", "read") for name, result in results.items()},
        traffic={name: sum(result.memory_bytes.values()) for name, result in results.items()},
    )


IDENTITY, RECALLED = "follows from the mechanism", "recalled, not checked"


def figures(cases: Sequence[Case]) -> list[Figure]:
    """Compare every published figure for which there are cases."""
    small = [case for case in cases if case.model in SMALL]
    compared = [*_of_small(small), *_of_large(cases)]
    for ranks, reads, near in ((8, 2.5, 7), (16, 2.2, 3)):
        compared += _of_degree([case for case in small if case.ranks == ranks], ranks, reads, near)
    return compared


def _of_small(cases: Sequence[Case]) -> list[Figure]:
    """Compare the paper's main figures: speed-ups, traffic, compute units split."""
    if not cases:
        return []
    compared = []
    for name, configuration, mean, maximum in (
        ("T3-MCA", "t3-mca", 30, 47),
        ("T3", "t3", 20, 39),
        ("ideal overlap", "ideal", 35, 50),
    ):
        gains = [case.speed_up(configuration) for case in cases]
        compared += [
            Figure(f"{name}, faster, geomean", mean, _percent(geometric_mean(gains)), 3, "%"),
            Figure(f"{name}, faster, maximum", maximum, _percent(max(gains)), 5, "%"),
        ]
    arbitrated = max(case.speed_up("t3-mca") / case.speed_up("t3") for case in cases)
    traffic = [case.traffic["t3-mca"] / case.traffic["sequential"] for case in cases]
    writes = geometric_mean([case.writes["sequential"] / case.writes["t3-mca"] for case in cases])
    reads = geometric_mean(
        [case.product_reads["sequential"] / case.product_reads["t3-mca"] for case in cases]
    )
    both = geometric_mean([case.both_speed_up for case in cases])
    longer = geometric_mean([case.slower("split-16", product=True) for case in cases])
    compared += [
        Figure("T3-MCA over T3, maximum", 29, _percent(arbitrated), 5, "%", RECALLED),
        Figure("DRAM traffic, geomean", -22, _percent(geometric_mean(traffic)), 3, "%"),
        Figure("DRAM traffic, most saved", -36, _percent(min(traffic)), 5, "%"),
        Figure(
            "writes of product and reduce-scatter, fewer", 10, _percent(writes), 2, "%", IDENTITY
        ),
        Figure("product reads, fewer", 1.56, reads, 0.15, "x", "the tile order was chosen by this"),
        Figure("product and all-reduce perfectly at once", 1.67, both, 0.08, "x"),
        Figure(
            "the product on 64 of 80 compute units takes longer",
            21,
            _percent(longer),
            5,
            "%",
            RECALLED,
        ),
    ]
    for units, gain, slower, note in (
        (8, 1.18, 41, f"{RECALLED}; copy_bytes_per_s is from this"),
        (16, 1.49, 7, RECALLED),
    ):
        name = f"{units} of 80 compute units for the all-reduce"
        split = geometric_mean([case.speed_up(f"split-{units}") for case in cases])
        longer = geometric_mean([case.slower(f"split-{units}", product=False) for case in cases])
        compared += [
            Figure(name, gain, split, 0.08, "x"),
            Figure(f"{name}: it takes longer", slower, _percent(longer), 5, "%", note),
        ]
    return compared


def _of_large(cases: Sequence[Case]) -> list[Figure]:
    gains = [case.speed_up("t3-mca") for case in cases if case.model in LARGE]
    if not gains:
        return []
    # The published maximum is over GPT-3 as well, with which ours could only be higher.
    return [
        Figure("T3-MCA, PALM and MT-NLG, geomean", 29, _percent(geometric_mean(gains)), 3, "%"),
        Figure("T3-MCA, PALM and MT-NLG, maximum", 35, _percent(max(gains)), 5, "%", RECALLED),
    ]


def _of_degree(cases: Sequence[Case], ranks: int, reads: float, near_memory: float) -> list[Figure]:
    """Compare the paper's figures for one tensor-parallel degree."""
    if not cases:
        return []
    fewer = geometric_mean([case.reads["sequential"] / case.reads["t3-mca"] for case in cases])
    gain = geometric_mean(
        [
            case.reduce_scatter_ns["sequential"] / case.reduce_scatter_ns["ideal-nmc"]
            for case in cases
        ]
    )
    note = "the link's reading was chosen by this"
    return [
        Figure(
            f"reduce-scatter reads, fewer, TP {ranks}", reads, fewer, 0.02 * reads, "x", IDENTITY
        ),
        Figure(f"near-memory compute alone, TP {ranks}", near_memory, _percent(gain), 1, "%", note),
    ]


def assumptions(machine: T3Machine) -> list[tuple[str, float | Sequence[float], str, str]]:
    """List every value of the machine: key, value, confidence, source."""
    rows = []
    for part in ("gpu", "memory", "network", "tracker", "dma", "arbitration"):
        values = getattr(machine, part)
        for name in type(values).model_fields:
            figure = getattr(values, name)
            # The topology is a name, and has no source.
            if not isinstance(figure, str):
                rows.append((f"{part}.{name}", figure.value, figure.confidence, figure.source))
    return rows


def _percent(ratio: float) -> float:
    """Return the per cent by which a ratio lies above 1."""
    return 100 * (ratio - 1)
