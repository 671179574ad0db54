"""The published study of DLRM training on 128 nodes (SC24), run again.

It compares the paper's figure with this model's, and shows the assumptions that make the
difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from interlace.errors import ConfigError
from interlace_sim.scenario import FUSING, Scenario
from interlace_sim.sweeps import Progress, run_all

PAPER_PERCENT = 21.0
"""SC24: DLRM training on 128 nodes, up to 21 % faster with the fused operator (arXiv:2305.06942,
abstract).
"""

ALGORITHMS = ("one_shot", "per_dimension", "direct", "ring")
BASELINES = ("one_shot", "per_dimension")
"""The best unfused all-to-all on a torus, and the algorithm of ASTRA-sim."""
NETWORKS = (
    ("2-D torus 8x16", "sc24-torus", "torus:8x16", 128),
    ("2-D torus 16x8", "sc24-torus", "torus:16x8", 128),
    ("3-D torus 4x4x8", "sc24-torus", "torus:4x4x8", 128),
    ("ring", "sc24-torus", "ring", 128),
    ("switch", "sc24-torus", "switch", 128),
    ("fat tree 2:1", "sc24-torus", "fattree:8x16/8", 128),
    ("16 nodes of 8 A100", "zionex-a100", "switch", 16),
)
NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# Each row is an assumption's title, its parameter, and a low and a high value, which span what
# published systems have.
ASSUMPTIONS: tuple[tuple[str, str, Any, Any], ...] = (
    ("unfused All-to-All", "all_to_all", "one_shot", "ring"),
    ("unfused All-to-All", "all_to_all", "one_shot", "per_dimension"),
    ("tables (1 to 8 a GPU)", "model.tables", 128, 1024),
    ("pooling factor", "model.pooling_factor", 20, 140),
    ("embedding dimension", "model.embedding_dim", 64, 128),
    ("bytes of an exchanged element", "model.exchange_bytes", 2, 4),
    ("bytes of a table's element", "model.embedding_bytes", 2, 4),
    ("samples a GPU", "model.batch_per_rank", 128, 2048),
    ("unpacking after the All-to-All", "model.unpack", False, True),
    ("interaction", "model.interaction", "concatenate", "dot"),
    ("link bandwidth, GB/s", "machine.network.link_bytes_per_s", 12.5e9, 50e9),
    ("hop latency, ns", "machine.network.latency_ns", 100, 2000),
    ("network", "topology", "torus2d", "switch"),
    ("memory efficiency", "machine.gpu.memory_efficiency", 0.5, 0.95),
    ("matrix efficiency", "machine.gpu.flops_efficiency", 0.2, 0.8),
    ("kernel overhead, ns", "machine.gpu.kernel_ns", 2000, 20000),
    ("collective launch, ns", "machine.collectives.launch_ns", 5000, 50000),
    ("library's share of the links", "machine.collectives.efficiency", 0.7, 1.0),
    ("fused kernel's slow-down", "machine.collectives.fused_slowdown", 1.0, 1.3),
    ("slices a destination", "slices", 1, 16),
)


@dataclasses.dataclass(frozen=True)
class Saving:
    """Time saved against the step with nothing fused, in percent of that step."""

    unfused_ms: float
    forward: float
    both: float


@dataclasses.dataclass(frozen=True)
class Study:
    """The savings of all scenarios of ``study sc24``.

    Attributes:
        base: The step with the presets as they are.
        bases: Savings of that step against each unfused all-to-all.
        table: (network, algorithm, saving).
        assumptions: (unfused all-to-all, name, low's name, high's name, saving at low, saving at
            high).
        curve: (nodes, algorithm, saving).
    """

    base: Saving
    table: list[tuple[str, str, Saving]]
    assumptions: list[tuple[str, str, str, str, Saving, Saving]]
    bases: dict[str, Saving]
    curve: list[tuple[int, str, Saving]]

    def matches(self) -> list[tuple[str, str, str, float]]:
        """List the scenarios within one and a half points of the paper's figure."""
        close = []
        for network, algorithm, saving in self.table:
            for name, value in (("forward", saving.forward), ("both", saving.both)):
                if abs(value - PAPER_PERCENT) <= 1.5:
                    close.append((network, algorithm, name, value))
        return close

    def spread(self, figure: Callable[[Saving], float]) -> tuple[float, float]:
        """Return the lowest and the highest saving over all scenarios of 128 GPUs."""
        values = [figure(saving) for *_, saving in self.table]
        values += [figure(saving) for *_, low, high in self.assumptions for saving in (low, high)]
        return min(values), max(values)

    def to_json(self) -> dict[str, Any]:
        return {
            "paper": {"percent": PAPER_PERCENT, "source": "arXiv:2305.06942, abstract"},
            "base": dataclasses.asdict(self.base),
            "range": {
                "forward": self.spread(lambda s: s.forward),
                "both": self.spread(lambda s: s.both),
            },
            "networks": [
                {"network": n, "all_to_all": a, **dataclasses.asdict(s)} for n, a, s in self.table
            ],
            "assumptions": [
                {
                    "all_to_all": algorithm,
                    "assumption": name,
                    "low": first,
                    "high": second,
                    "at_low": dataclasses.asdict(low),
                    "at_high": dataclasses.asdict(high),
                }
                for algorithm, name, first, second, low, high in self.assumptions
            ],
            "nodes": [
                {"nodes": n, "all_to_all": a, **dataclasses.asdict(s)} for n, a, s in self.curve
            ],
            "matches": self.matches(),
        }


def sc24(
    *,
    workers: int | None = None,
    cache_folder: Path | None = None,
    nodes: Sequence[int] = NODES,
    progress: Progress | None = None,
) -> Study:
    """Run the study.

    Args:
        workers: Number of processes; None is all processors, 1 runs in this process.
        cache_folder: Folder of remembered outcomes; None remembers nothing.
        nodes: Node counts of the curve.
        progress: Called after every run.
    """
    base = Scenario("dlrm")
    # The table varies network and unfused algorithm together, since they depend on each other.
    table = [
        (
            name,
            algorithm,
            base.change(
                {"machine": machine, "topology": topology, "nodes": count, "all_to_all": algorithm}
            ),
        )
        for name, machine, topology, count in NETWORKS
        for algorithm in ALGORITHMS
    ]
    bases = {algorithm: base.change({"all_to_all": algorithm}) for algorithm in BASELINES}
    # Every assumption is varied alone, against each baseline.
    assumptions = [
        (
            algorithm,
            name,
            _name(low),
            _name(high),
            start.change({parameter: low}),
            start.change({parameter: high}),
        )
        for algorithm, start in bases.items()
        for name, parameter, low, high in ASSUMPTIONS
        # The unfused all-to-all is varied against one baseline only: the other would repeat it.
        if parameter != "all_to_all" or algorithm == "one_shot"
    ]
    curve = [
        (count, algorithm, base.change({"nodes": count, "all_to_all": algorithm}))
        for count in nodes
        for algorithm in BASELINES
    ]
    scenarios = [
        base,
        *(row[2] for row in table),
        *bases.values(),
        *(s for row in assumptions for s in row[4:]),
        *(row[2] for row in curve),
    ]
    every = [
        scenario.change({"fused": fused}).complete() for scenario in scenarios for fused in FUSING
    ]
    # Scenarios repeat between the tables, and each is run once.
    times = run_all(list(dict.fromkeys(every)), workers, cache_folder, progress)

    def saving(scenario: Scenario) -> Saving:
        outcomes = [times[scenario.change({"fused": fused}).complete()] for fused in FUSING]
        for outcome in outcomes:
            if "error" in outcome:
                raise ConfigError(outcome["error"])
        unfused, forward, both = (outcome["total_ns"] for outcome in outcomes)
        return Saving(unfused / 1e6, 100 * (1 - forward / unfused), 100 * (1 - both / unfused))

    return Study(
        saving(base),
        [(name, algorithm, saving(scenario)) for name, algorithm, scenario in table],
        [
            (algorithm, name, low, high, saving(first), saving(second))
            for algorithm, name, low, high, first, second in assumptions
        ],
        {algorithm: saving(scenario) for algorithm, scenario in bases.items()},
        [(count, algorithm, saving(scenario)) for count, algorithm, scenario in curve],
    )


def _name(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value >= 1e9:
        return f"{value / 1e9:g}"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
