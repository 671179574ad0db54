"""Sensitivity to the assumptions: each is changed alone, and the sub-layer is simulated again."""

from __future__ import annotations

import dataclasses
from typing import Any

from interlace.sim.sweeps import Progress
from interlace.sim.t3.machine import load_t3_machine
from interlace.sim.t3.product import Product
from interlace.sim.t3.run import simulate

CONFIGURATIONS = ("t3", "t3-mca", "ideal")
CHANGES: dict[str, tuple[float, ...]] = {
    "gpu.efficiency": (0.8, 1.0),
    "gpu.lockstep": (0,),
    "gpu.k_step": (32, 128),
    "gpu.group_rows": (4, 16),
    "memory.cache_bytes_per_s": (1.4e12, 1e16),
    "memory.latency_ns": (250, 1000),
    "memory.queue_entries": (32, 256),
    "memory.group_column_ns": (1, 3),
    "memory.update_column_ns": (2, 8),
    "memory.row_cycle_ns": (24, 94),
    "network.bytes_per_s": (75e9, 300e9),
    "network.latency_ns": (250, 1000),
    "network.posted": (1,),
    "tracker.sets": (16, 1024),
    "dma.engines": (1, 32),
    "dma.start_ns": (0, 1000),
    "arbitration.starvation_ns": (2000, 200000),
}
"""Alternatives for values that the paper leaves open, or on which readings of it differ."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Speed-ups with one value changed, against the sequential sub-layer with that value."""

    key: str
    value: float | None
    speed_ups: dict[str, float]


def sensitivity(
    machine_name: str,
    changes: dict[str, Any],
    product: Product,
    ranks: int,
    progress: Progress | None = None,
) -> list[Row]:
    """Simulate the machine as it is, and with each of :data:`CHANGES`."""
    alternatives: list[tuple[str, float | None]] = [("as given", None)]
    alternatives += [(key, value) for key, values in CHANGES.items() for value in values]
    rows = []
    for key, value in alternatives:
        changed = changes if value is None else {**changes, key: value}
        machine = load_t3_machine(machine_name, changed)
        # The baseline has the change as well: a faster link helps both.
        base, *others = (
            simulate(machine, product, ranks, name).total_ns
            for name in ("sequential", *CONFIGURATIONS)
        )
        gains = {name: base / time for name, time in zip(CONFIGURATIONS, others, strict=True)}
        rows.append(Row(key, value, gains))
        if progress is not None:
            progress(len(rows), len(alternatives))
    return rows
