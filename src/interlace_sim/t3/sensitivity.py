"""Sensitivity to the assumptions: one or two are changed, and the sub-layer is simulated again."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from interlace_sim.sweeps import Progress
from interlace_sim.t3.machine import load_t3_machine
from interlace_sim.t3.product import Product
from interlace_sim.t3.run import simulate

CONFIGURATIONS = ("t3", "t3-mca", "ideal")
CHANGES: dict[str, tuple[float, ...]] = {
    "gpu.efficiency": (0.8, 1.0),
    "gpu.lockstep": (0, 1),
    "gpu.tile_columns": (64, 256),
    "gpu.k_step": (32, 128),
    "gpu.group_rows": (4, 16),
    "memory.cache_bytes_per_s": (1.4e12, 1e16),
    "memory.latency_ns": (125, 500),
    "memory.queue_entries": (32, 256),
    "memory.group_column_ns": (1, 3),
    "memory.update_column_ns": (2, 8),
    "memory.row_cycle_ns": (24, 94),
    "network.bytes_per_s": (75e9, 300e9),
    "network.latency_ns": (250, 1000),
    "network.posted": (0, 1),
    "tracker.sets": (16, 1024),
    "dma.engines": (1, 32),
    "dma.start_ns": (0, 1000),
    "arbitration.starvation_ns": (2000, 200000),
}
"""Alternatives for values that the paper leaves open, or on which readings of it differ. A value
that the machine has already is passed over.
"""
_KEYS = [tuple(key.split(".")) for key in CHANGES]


@dataclasses.dataclass(frozen=True)
class Row:
    """Speed-ups of a machine with some values changed, against its own sequential sub-layer.

    Attributes:
        changes: Dotted key -> value; empty for the machine as it is given.
        speed_ups: Sequential time over the time of each of :data:`CONFIGURATIONS`.
    """

    changes: dict[str, float]
    speed_ups: dict[str, float]


def sensitivity(
    machine_name: str,
    given: dict[str, Any],
    product: Product,
    ranks: int,
    *,
    pairs: bool = False,
    progress: Progress | None = None,
) -> list[Row]:
    """Simulate a machine as it is given, and with values changed.

    Args:
        machine_name: A preset or YAML file.
        given: Changes that all rows have.
        product: The matrix product of the sub-layer.
        ranks: Number of GPUs.
        pairs: Change two values at a time, of those that the machine marks as assumed, instead of
            each of :data:`CHANGES` alone.
        progress: Called after every row.
    """
    machine = load_t3_machine(machine_name, given)
    values = {(part, name): getattr(getattr(machine, part), name) for part, name in _KEYS}
    single = [
        {f"{part}.{name}": value}
        for part, name in _KEYS
        for value in CHANGES[f"{part}.{name}"]
        if value != values[part, name].value
        and (not pairs or values[part, name].confidence == "assumed")
    ]
    alternatives: list[dict[str, float]] = [{}, *single]
    if pairs:
        both = (first | second for first, second in itertools.combinations(single, 2))
        # Two values of one key are no pair.
        alternatives = [{}, *(pair for pair in both if len(pair) == 2)]
    rows = []
    for changes in alternatives:
        changed = load_t3_machine(machine_name, {**given, **changes})
        # The baseline has the change as well: a faster link helps both.
        base, *others = (
            simulate(changed, product, ranks, name).total_ns
            for name in ("sequential", *CONFIGURATIONS)
        )
        gains = {name: base / time for name, time in zip(CONFIGURATIONS, others, strict=True)}
        rows.append(Row(changes, gains))
        if progress is not None:
            progress(len(rows), len(alternatives))
    return rows
