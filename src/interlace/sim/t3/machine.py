"""The machine that T3 is simulated on, each value with its source and confidence; presets lie in ``presets/t3_machines``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from interlace.sim.configfile import Strict, parse, read
from interlace.sim.machine import Confidence, Given, find, replace


class SourcedList(BaseModel):
    """Several numbers, their source, and how far to trust them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: tuple[float, ...]
    source: Annotated[str, Field(min_length=3)]
    confidence: Confidence


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
    copy_bytes_per_s: Given
    """What one compute unit sends in a library's collective."""

    @property
    def flops_per_s(self) -> float:
        """Peak of all compute units."""
        return self.compute_units.value * self.clock_hz.value * self.flops_per_clock.value


class Memory(Strict):
    """Last-level cache, DRAM and its controller."""

    cache_bytes: Given
    bytes_per_s: Given
    efficiency: Given
    channels: Given
    queue_entries: Given
    """Of each channel."""
    entry_bytes: Given
    update_cost: Given
    """Time of a near-memory op-and-store over that of a write."""
    turnaround_ns: Given
    """Lost whenever a channel changes between reading and writing."""
    latency_ns: Given
    """Of a read on an idle memory, beside the time on the bus."""


class Ring(Strict):
    """The links, in each direction."""

    link_bytes_per_s: Given
    latency_ns: Given


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
    network: Ring
    tracker: TrackerSize
    dma: DmaEngines
    arbitration: Arbitration

    @model_validator(mode="after")
    def _possible(self) -> T3Machine:
        may_be_zero = {"latency_ns", "turnaround_ns", "start_ns", "starvation_ns", "ways", "sets"}
        for part in (self.gpu, self.memory, self.network, self.tracker, self.dma):
            for name in type(part).model_fields:
                value = getattr(part, name).value
                if value == 0 and name not in may_be_zero:
                    raise ValueError(f"{name} must be above 0")
                if name == "efficiency" and value > 1:
                    raise ValueError("efficiency must not be above 1")
        if self.memory.update_cost.value < 1:
            raise ValueError("update_cost must be at least 1")
        return self


def load_t3_machine(name: str = "t3-paper", changes: dict[str, Any] | None = None) -> T3Machine:
    """A preset or YAML file, with values replaced.

    Args:
        changes: dotted key -> number, say ``{"tracker.sets": 64}``.

    Raises:
        ConfigError: unknown name or key, or a value that no machine can have.
    """
    file = find("t3_machines", name)
    data = read(file)
    for key, value in (changes or {}).items():
        replace(data, key, value, str(file))
    return parse(T3Machine, data, f"{file} with changes" if changes else str(file))
