"""The machine that T3 is simulated on, each value with its source and confidence; presets lie in
``presets/t3_machines``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from interlace.sim.configfile import Strict
from interlace.sim.machine import Confidence, Given, find, load_changed


class SourcedList(BaseModel):
    """Several numbers, their source, and how far to trust them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: tuple[float, ...]
    source: Annotated[str, Field(min_length=3)]
    confidence: Confidence


_MAY_BE_ZERO = frozenset(
    (
        *(
            "latency_ns",
            "row_open_ns",
            "row_cycle_ns",
            "row_gap_ns",
            "write_recovery_ns",
            "read_to_write_ns",
            "write_to_read_ns",
        ),
        *("group_column_ns", "update_column_ns", "start_ns", "starvation_ns", "library_launch_ns"),
        *("ways", "sets", "lockstep", "posted"),
    )
)


class ComputeUnits(Strict):
    """What computes, and how a matrix product is laid on it."""

    compute_units: Given
    clock_hz: Given
    flops_per_clock: Given
    """Of one compute unit, in the product's type."""
    efficiency: Given
    """Share of that in a tile's inner loop, its inputs being there."""
    tile_rows: Given
    tile_columns: Given
    k_step: Given
    """Of the inner dimension, loaded at a time; two steps fit."""
    group_rows: Given
    """Rows of tiles through which the tile order goes down before it goes on to the next column."""
    lockstep: Given
    """1 where a stage's tiles start when all of the stage before have been stored, 0 where each
    starts when its unit is free.
    """
    copy_bytes_per_s: Given
    """What one compute unit sends in a library's collective."""

    @property
    def flops_per_s(self) -> float:
        """Peak of all compute units."""
        return self.compute_units.value * self.clock_hz.value * self.flops_per_clock.value


class Memory(Strict):
    """Last-level cache, DRAM and its controller."""

    cache_bytes: Given
    cache_bytes_per_s: Given
    """Between the last-level cache and all compute units."""
    bytes_per_s: Given
    channels: Given
    queue_entries: Given
    """Column accesses that wait in each channel."""
    column_bytes: Given
    """Of one column access."""
    row_bytes: Given
    """Of one row of one bank."""
    banks: Given
    bank_groups: Given
    group_column_ns: Given
    """From one column access to the next in the same bank group (tCCD_L)."""
    update_column_ns: Given
    """The same, for near-memory op-and-store."""
    row_open_ns: Given
    """To close a row and open another (tRP + tRCD)."""
    row_cycle_ns: Given
    """From opening a row to opening another in the same bank (tRC)."""
    row_gap_ns: Given
    """From opening a row to opening one in another bank (tRRD)."""
    write_recovery_ns: Given
    """From a write to closing its row (tWR)."""
    read_to_write_ns: Given
    write_to_read_ns: Given
    latency_ns: Given
    """Of a read on an idle memory, beside the time in the channel."""


class Links(Strict):
    """Between the GPUs."""

    topology: Literal["ring", "full", "switch"] = "ring"
    bytes_per_s: Given
    """That leave a GPU, and as many that arrive. A mesh shares them out over its links."""
    latency_ns: Given
    """From one GPU to the next."""
    posted: Given
    """1 where a store to another GPU is acknowledged as it leaves for the link, 0 where it is when
    it has arrived.
    """
    library_efficiency: Given
    """Share of the links' bandwidth that a library's collectives reach."""
    library_launch_ns: Given
    """Before the first byte of a library's collective moves."""


class TrackerSize(Strict):
    """Counters of outstanding blocks of the output."""

    sets: Given
    ways: Given


class DmaEngines(Strict):
    """What sends a block once it is triggered."""

    engines: Given
    start_ns: Given


class Arbitration(Strict):
    """T3-MCA's rule: the more memory-intensive the product's first stage, the lower the threshold."""

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
        """Entries of a DRAM queue below which communication may enter it."""
        for threshold, least in zip(self.thresholds.value, self.intensities.value, strict=True):
            if intensity >= least:
                return threshold
        return float("inf")


class T3Machine(Strict):
    """One GPU of a ring of equal ones."""

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
        if self.memory.update_column_ns.value < self.memory.group_column_ns.value:
            raise ValueError("update_column_ns must be at least group_column_ns")
        return self


def load_t3_machine(name: str = "t3-paper", changes: dict[str, Any] | None = None) -> T3Machine:
    """A preset or YAML file, with values replaced.

    Args:
        changes: dotted key -> number, say ``{"tracker.sets": 64}``.

    Raises:
        ConfigError: unknown name or key, or a value that no machine can have.
    """
    return load_changed(T3Machine, find("t3_machines", name), changes)
