"""The machine that T3 is simulated on, with a source and a confidence for each value.

Presets lie in ``presets/t3_machines``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from interlace_sim.configfile import Strict
from interlace_sim.machine import Given, Source, find, load_changed


class SourcedList(Source):
    """Several numbers with their source and a confidence."""

    value: tuple[float, ...]


# Times that an ideal machine may lack, and switches that are 0 or 1.
_MAY_BE_ZERO = {
    "latency_ns",
    "row_open_ns",
    "row_cycle_ns",
    "row_gap_ns",
    "write_recovery_ns",
    "read_to_write_ns",
    "write_to_read_ns",
    "group_column_ns",
    "update_column_ns",
    "start_ns",
    "starvation_ns",
    "library_launch_ns",
    "ways",
    "sets",
    "lockstep",
    "posted",
}


_COUNTS = {
    "compute_units",
    "tile_rows",
    "tile_columns",
    "k_step",
    "group_rows",
    "channels",
    "queue_entries",
    "column_bytes",
    "row_bytes",
    "banks",
    "bank_groups",
    "sets",
    "ways",
    "engines",
}
_MOST = 2**16
"""The largest count; every unit, bank and engine is simulated."""


class ComputeUnits(Strict):
    """Compute units, and the layout of a matrix product on them."""

    compute_units: Given
    clock_hz: Given
    flops_per_clock: Given
    """FLOPs per clock of one compute unit in the product's type."""
    efficiency: Given
    """Share of the peak that a tile's inner loop reaches once its inputs have arrived."""
    tile_rows: Given
    tile_columns: Given
    k_step: Given
    """Elements of the inner dimension that are loaded at a time; two steps fit."""
    group_rows: Given
    """Rows of tiles that the tile order passes before it goes on to the next column."""
    lockstep: Given
    """1 if a stage's tiles start when all tiles of the stage before have been stored, 0 if a tile
    starts when its unit is free.
    """
    copy_bytes_per_s: Given
    """Bytes per second that one compute unit sends in a library's collective."""

    @property
    def flops_per_s(self) -> float:
        """Peak of all compute units."""
        return self.compute_units.value * self.clock_hz.value * self.flops_per_clock.value


class Memory(Strict):
    """Last-level cache, DRAM and memory controller."""

    cache_bytes: Given
    cache_bytes_per_s: Given
    """Bytes per second between the last-level cache and all compute units."""
    bytes_per_s: Given
    channels: Given
    queue_entries: Given
    """Column accesses that wait in each channel."""
    column_bytes: Given
    """Bytes of one column access."""
    row_bytes: Given
    """Bytes of one row of one bank."""
    banks: Given
    bank_groups: Given
    group_column_ns: Given
    """Nanoseconds from one column access to the next in its bank group (tCCD_L)."""
    update_column_ns: Given
    """Nanoseconds between column accesses of near-memory op-and-store."""
    row_open_ns: Given
    """Nanoseconds to close a row and open another (tRP + tRCD)."""
    row_cycle_ns: Given
    """Nanoseconds from opening a row to opening another in its bank (tRC)."""
    row_gap_ns: Given
    """Nanoseconds from opening a row to opening one in another bank (tRRD)."""
    write_recovery_ns: Given
    """Nanoseconds from a write to closing its row (tWR)."""
    read_to_write_ns: Given
    write_to_read_ns: Given
    latency_ns: Given
    """Nanoseconds of a read on an idle memory, on top of the time in the channel."""


class Links(Strict):
    """The links between the GPUs."""

    topology: Literal["ring", "full", "switch"] = "ring"
    bytes_per_s: Given
    """Bytes per second that leave a GPU, and that arrive. A mesh splits them over its links."""
    latency_ns: Given
    """Nanoseconds from one GPU to the next."""
    posted: Given
    """1 if a store to another GPU is acknowledged when it leaves for the link, 0 if it is
    acknowledged when it has arrived.
    """
    library_efficiency: Given
    """Share of the links' bandwidth that a library's collectives reach."""
    library_launch_ns: Given
    """Nanoseconds before the first byte of a library's collective moves."""


class TrackerSize(Strict):
    """Counters of outstanding blocks of the output."""

    sets: Given
    ways: Given


class DmaEngines(Strict):
    """The engines that send a block once it is triggered."""

    engines: Given
    start_ns: Given


class Arbitration(Strict):
    """T3-MCA's rule: the more memory-intensive the first stage, the lower the threshold."""

    thresholds: SourcedList
    intensities: SourcedList
    starvation_ns: Given

    @model_validator(mode="after")
    def _paired(self) -> Arbitration:
        steps = self.intensities.value
        if len(self.thresholds.value) != len(steps) or list(steps) != sorted(steps, reverse=True):
            raise ValueError("intensities must fall, one for each threshold")
        return self

    def threshold(self, intensity: float) -> float:
        """Return the entries of a DRAM queue below which communication may enter it."""
        # Intensities fall, so the first that is reached is the highest.
        for threshold, least in zip(self.thresholds.value, self.intensities.value, strict=True):
            if intensity >= least:
                return threshold
        return float("inf")


class T3Machine(Strict):
    """A group of equal GPUs with T3's memory system."""

    name: str
    note: str = ""
    gpu: ComputeUnits
    memory: Memory
    network: Links
    tracker: TrackerSize
    dma: DmaEngines
    arbitration: Arbitration

    @model_validator(mode="after")
    def _possible(self) -> T3Machine:
        for part in (self.gpu, self.memory, self.network, self.tracker, self.dma):
            for name in type(part).model_fields.keys() - {"topology"}:
                value = getattr(part, name).value
                if value == 0 and name not in _MAY_BE_ZERO:
                    raise ValueError(f"{name} must be above 0")
                if name in ("efficiency", "library_efficiency") and value > 1:
                    raise ValueError(f"{name} must not be above 1")
                if name in _COUNTS and (value != int(value) or value > _MOST):
                    raise ValueError(f"{name} must be a whole number of at most {_MOST}")
        # An update reads and writes a column, so it cannot be faster than a read.
        if self.memory.update_column_ns.value < self.memory.group_column_ns.value:
            raise ValueError("update_column_ns must be at least group_column_ns")
        return self


def load_t3_machine(name: str = "t3-paper", changes: dict[str, Any] | None = None) -> T3Machine:
    """Load a machine from a preset or YAML file, with values replaced.

    Args:
        name: A preset of ``presets/t3_machines``, or a file.
        changes: Dotted key -> number, say ``{"tracker.sets": 64}``.

    Raises:
        ConfigError: unknown name or key, or a value that no machine can have.
    """
    return load_changed(T3Machine, find("t3_machines", name), changes)
