"""What T3's hardware would still gain over software that was measured: documents of ``interlace
bench``, shape by shape.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlace.costs import OPERATOR_COSTS
from interlace.errors import ConfigError
from interlace.sim.t3.collectives import TRAFFIC, Collective
from interlace.sim.t3.machine import T3Machine
from interlace.sim.t3.product import Product
from interlace.sim.t3.run import COLLECTIVES, SubLayer, simulate

OPERATORS: dict[str, Collective] = {
    declared.operator: collective
    for collective in COLLECTIVES
    for declared in OPERATOR_COSTS.values()
    if declared.computation == "GEMM"
    and not declared.collective_first
    and declared.collective == TRAFFIC[collective]
}
"""Operators that T3's hardware runs as well, by name: one product, and then a collective of T3."""
IMPLEMENTATIONS = ("fused", "remote_stores", "chunked", "triggered")
"""Ours, as a document's times name them; the unfused pair is none of them."""
_OTHERS = {"unfused": "cuBLAS + NCCL", "product": "cuBLAS alone", "collective": "NCCL alone"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One shape: measured, and on a simulated machine; nanoseconds, without an all-gather.

    Attributes:
        measured_ns: ``unfused``, ``product``, ``collective``, and those of :data:`IMPLEMENTATIONS`
            that were measured.
        modelled_ns: ``sequential``, ``t3-mca``, ``ideal``, ``product`` and ``collective``.
        floor_ns: the links, or the product at the measured ceilings.
    """

    operator: str
    product: Product
    ranks: int
    measured_ns: dict[str, float]
    modelled_ns: dict[str, int]
    floor_ns: float

    @property
    def error(self) -> float:
        """Of the modelled sequential time against the measured unfused one."""
        return self.modelled_ns["sequential"] / self.measured_ns["unfused"] - 1

    def corrected_ns(self, configuration: str) -> float:
        """Modelled, times what the model errs on the product alone: that is the same whatever moves
        its output.
        """
        return (
            self.modelled_ns[configuration]
            * self.measured_ns["product"]
            / self.modelled_ns["product"]
        )

    @property
    def software(self) -> str:
        """The implementation of ours that was measured to be the fastest."""
        return min(
            (name for name in IMPLEMENTATIONS if name in self.measured_ns),
            key=lambda name: self.measured_ns[name],
        )

    @property
    def software_ns(self) -> float:
        """Its measured time."""
        return self.measured_ns[self.software]

    @property
    def gain(self) -> float:
        """T3 over our fastest implementation; below 1 the software is the faster one."""
        return self.software_ns / self.corrected_ns("t3-mca")


def compare(machine: T3Machine, files: Sequence[Path]) -> tuple[list[Comparison], list[str]]:
    """Each shape of benchmarks' documents whose tiles fill the machine, and the names of the
    others.

    Fewer tiles than compute units are the business of a library that picks smaller ones or splits
    the inner dimension; this model has one tile, so it says nothing of them.

    Raises:
        ConfigError: a file cannot be read, or is no document of ``interlace bench`` with one of
            :data:`OPERATORS`.
    """
    found, left_out = [], []
    for row in (row for file in files for row in _rows(file)):
        product = Product(
            str(row["shape"]), int(row["rows"]), int(row["columns"]), int(row["inner"])
        )
        tiles = -(-product.rows // int(machine.gpu.tile_rows.value)) * -(
            -product.columns // int(machine.gpu.tile_columns.value)
        )
        if tiles < machine.gpu.compute_units.value:
            left_out.append(f"{row['operator']} {product.name}")
            continue
        found.append(_compare(machine, row, product))
    return found, left_out


def _rows(file: Path) -> Sequence[dict[str, Any]]:
    try:
        rows = json.loads(file.read_text())["results"]
        known = [
            row
            for row in rows
            if row["operator"] in OPERATORS
            and {_OTHERS["unfused"], _OTHERS["product"]} <= row["times"].keys()
            and not row["times"].keys().isdisjoint(IMPLEMENTATIONS)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} must be a document of interlace bench; {type(error).__name__}: {error}."
        ) from error
    if not known:
        raise ConfigError(
            f"{file} must have times of {' or '.join(OPERATORS)}, unfused and not; it has none."
        )
    return known


def _compare(machine: T3Machine, row: dict[str, Any], product: Product) -> Comparison:
    ranks, collective = int(row["world_size"]), OPERATORS[row["operator"]]
    runs = {
        name: simulate(machine, product, ranks, name, collective)
        for name in ("sequential", "t3-mca", "ideal")
    }
    parts = runs["sequential"].parts
    measured = {**_OTHERS, **{name: name for name in IMPLEMENTATIONS}}
    return Comparison(
        operator=row["operator"],
        product=product,
        ranks=ranks,
        measured_ns={
            name: 1000 * row["times"][key]["median_us"]
            for name, key in measured.items()
            if key in row["times"]
        },
        modelled_ns={
            **{name: _without_gather(run) for name, run in runs.items()},
            "product": parts[0].time_ns,
            "collective": parts[1].time_ns,
        },
        floor_ns=1000 * row["floor_us"],
    )


def _without_gather(run: SubLayer) -> int:
    """The all-gather of a sub-layer begins when all else has ended."""
    return run.total_ns - sum(part.time_ns for part in run.parts if part.name == "all-gather")
