"""The gain of T3's hardware over measured software, from documents of ``interlace bench``, shape by
shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlace.costs import OPERATOR_COSTS
from interlace.errors import ConfigError
from interlace.units import ceil_div
from interlace_sim.configfile import integer, mapped, number, read
from interlace_sim.sweeps import Progress
from interlace_sim.t3.collectives import Collective
from interlace_sim.t3.machine import T3Machine
from interlace_sim.t3.product import Product
from interlace_sim.t3.run import COLLECTIVES, simulate
from interlace_sim.t3.sublayer import SubLayer

OPERATORS: dict[str, Collective] = {
    declared.operator: collective
    for collective in COLLECTIVES
    for declared in OPERATOR_COSTS.values()
    if declared.computation == "GEMM"
    and not declared.collective_first
    and declared.collective == collective
}
"""Operators that T3's hardware runs as well, by name: one product, and then a collective of T3."""
IMPLEMENTATIONS = ("fused", "remote_stores", "chunked")
"""Our implementations by their names in a document; the unfused pair is not among them."""
_BASELINES = {"unfused": "cuBLAS + NCCL", "product": "cuBLAS alone", "collective": "NCCL alone"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Times of one shape in nanoseconds, measured and simulated, without an all-gather.

    Attributes:
        operator: The operator's name.
        product: The matrix product on each GPU.
        ranks: Number of GPUs.
        measured_ns: ``unfused``, ``product``, ``collective``, and those of :data:`IMPLEMENTATIONS`
            that were measured.
        modelled_ns: ``sequential``, ``t3-mca``, ``ideal``, ``product`` and ``collective``.
        floor_ns: Physical floor: the links, or the product at the measured ceilings.
    """

    operator: str
    product: Product
    ranks: int
    measured_ns: dict[str, float]
    modelled_ns: dict[str, int]
    floor_ns: float

    @property
    def error(self) -> float:
        """Relative error of the modelled sequential time against the measured unfused one."""
        return self.modelled_ns["sequential"] / self.measured_ns["unfused"] - 1

    def corrected_ns(self, configuration: str) -> float:
        """Return the modelled nanoseconds, corrected by the model's error on the product alone.

        That error does not depend on the transport of the product's output.
        """
        return (
            self.modelled_ns[configuration]
            * self.measured_ns["product"]
            / self.modelled_ns["product"]
        )

    @property
    def software(self) -> str:
        """Our fastest implementation by measurement."""
        return min(
            (name for name in IMPLEMENTATIONS if name in self.measured_ns),
            key=lambda name: self.measured_ns[name],
        )

    @property
    def software_ns(self) -> float:
        """The measured nanoseconds of our fastest implementation."""
        return self.measured_ns[self.software]

    @property
    def gain(self) -> float:
        """Speed-up of T3 over our fastest implementation; below 1 the software is faster."""
        return self.software_ns / self.corrected_ns("t3-mca")


def compare(
    machine: T3Machine, files: Sequence[Path], *, progress: Progress | None = None
) -> tuple[list[Comparison], list[str]]:
    """Compare each shape of some benchmark documents whose tiles fill the machine.

    For fewer tiles than compute units a library picks smaller tiles or splits the inner dimension.
    This model has one tile size, so such shapes are left out.

    Args:
        machine: The machine with T3's hardware.
        files: Documents, all of which are read before the first shape is simulated.
        progress: Called before the first shape and after each.

    Returns:
        The comparisons, and the names of the shapes that were left out.

    Raises:
        ConfigError: a file cannot be read, or is no document of ``interlace bench`` with one of
            :data:`OPERATORS`.
    """
    compared: list[Comparison] = []
    left_out: list[str] = []
    rows = [row for file in files for row in _rows(file)]
    report = progress or (lambda done, total: None)
    for done, row in enumerate(rows):
        report(done, len(rows))
        product = Product(
            str(row.get("shape", "a product")),
            int(row["rows"]),
            int(row["columns"]),
            int(row["inner"]),
        )
        tile_rows, tile_columns = machine.gpu.tile_rows.value, machine.gpu.tile_columns.value
        tiles = ceil_div(product.rows, int(tile_rows)) * ceil_div(
            product.columns, int(tile_columns)
        )
        # A stage that does not fill the machine is a case for smaller tiles.
        if tiles < machine.gpu.compute_units.value:
            left_out.append(f"{row['operator']} {product.name}")
            continue
        compared.append(_compare(machine, row, product))
    report(len(rows), len(rows))
    return compared, left_out


def _rows(file: Path) -> Sequence[dict[str, Any]]:
    try:
        rows = read(file)["results"]
        # Documents of other operators may be in one file, and are ignored.
        known = [
            row
            for row in rows
            if row["operator"] in OPERATORS
            and {_BASELINES["unfused"], _BASELINES["product"]} <= row["times"].keys()
            and not row["times"].keys().isdisjoint(IMPLEMENTATIONS)
        ]
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} must be a document of interlace bench; {type(error).__name__}: {error}."
        ) from error
    for place, row in enumerate(known):
        for name in ("rows", "columns", "inner", "world_size"):
            integer(row.get(name), f"{file}, results[{place}].{name}", least=1)
        number(row.get("floor_us"), f"{file}, results[{place}].floor_us", most=1e15)
        for key in (*_BASELINES.values(), *IMPLEMENTATIONS):
            if key in row["times"]:
                location = f"{file}, results[{place}].times.{key}"
                times = mapped(row["times"][key], location)
                number(times.get("median_us"), f"{location}.median_us", least=1e-3, most=1e15)
    if not known:
        raise ConfigError(
            f"{file} must have times of {' or '.join(OPERATORS)}, unfused and not; it has none."
        )
    return known


def _compare(machine: T3Machine, row: dict[str, Any], product: Product) -> Comparison:
    ranks, collective = int(row["world_size"]), OPERATORS[row["operator"]]
    # T3 between its bounds: everything one after the other, and perfect overlap.
    runs = {
        name: simulate(machine, product, ranks, name, collective)
        for name in ("sequential", "t3-mca", "ideal")
    }
    parts = runs["sequential"].parts
    measured = {**_BASELINES, **{name: name for name in IMPLEMENTATIONS}}
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
    """Return the time before a sub-layer's all-gather, which begins when all else has ended."""
    return run.total_ns - sum(part.time_ns for part in run.parts if part.name == "all_gather")
