"""A matrix product as a GPU runs it: tiles in an order, stages of one tile a compute unit, and the reads that miss the cache."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Hashable

from interlace.errors import ConfigError
from interlace.sim.t3.machine import T3Machine

ELEMENT_BYTES = 2
"""fp16, as in the paper."""


@dataclasses.dataclass(frozen=True)
class Product:
    """``[rows, depth] @ [depth, columns]`` in fp16, a partial sum of ``[rows, columns]`` on each GPU.

    Raises:
        ConfigError: a size below 1.
    """

    name: str
    rows: int
    columns: int
    depth: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.depth) < 1:
            raise ConfigError(f"sizes of a product must be at least 1; got {self.rows} x {self.columns} x {self.depth}.")

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.depth

    @property
    def input_bytes(self) -> int:
        return ELEMENT_BYTES * self.depth * (self.rows + self.columns)

    @property
    def output_bytes(self) -> int:
        return ELEMENT_BYTES * self.rows * self.columns


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a product does, step by step.

    Attributes:
        tiles: how many.
        stages: tiles computed together, as half-open ranges of the tile order.
        step_ns: time of one step of the inner dimension, inputs being there; it does not depend on how full a stage is.
        read_bytes: that each step of each stage reads from DRAM, the rest being in the cache.
    """

    tiles: int
    stages: list[tuple[int, int]]
    step_ns: float
    read_bytes: list[list[int]]


@functools.lru_cache(maxsize=256)
def schedule(machine: T3Machine, product: Product, compute_units: int, outputs_bypass: bool) -> Schedule:
    """Lay ``product`` on ``compute_units``; with ``outputs_bypass`` its outputs take no room in the cache."""
    gpu = machine.gpu
    rows, columns, k_step = int(gpu.tile_rows.value), int(gpu.tile_columns.value), int(gpu.k_step.value)
    tiles = _order(-(-product.rows // rows), -(-product.columns // columns), int(gpu.group_rows.value))
    stages = [(first, min(first + compute_units, len(tiles))) for first in range(0, len(tiles), compute_units)]
    depths = _parts(product.depth, k_step)
    heights, widths = _parts(product.rows, rows), _parts(product.columns, columns)
    cache = _Cache(int(machine.memory.cache_bytes.value))
    reads: list[list[int]] = []
    for first, last in stages:
        stage = tiles[first:last]
        used_rows, used_columns = sorted({tile[0] for tile in stage}), sorted({tile[1] for tile in stage})
        steps = []
        for step, depth in enumerate(depths):
            missed = sum(cache.touch(("a", row, step), ELEMENT_BYTES * heights[row] * depth) for row in used_rows)
            missed += sum(cache.touch(("b", column, step), ELEMENT_BYTES * widths[column] * depth) for column in used_columns)
            steps.append(missed)
        reads.append(steps)
        if not outputs_bypass:
            for row, column in stage:
                cache.touch(("out", row, column), ELEMENT_BYTES * heights[row] * widths[column])
    unit = gpu.clock_hz.value * gpu.flops_per_clock.value * gpu.efficiency.value
    return Schedule(len(tiles), stages, 1e9 * 2 * rows * columns * k_step / unit, reads)


def _order(rows: int, columns: int, group: int) -> list[tuple[int, int]]:
    """Down ``group`` rows of tiles, then on to the next column; then the next group."""
    return [
        (row, column)
        for first in range(0, rows, group)
        for column in range(columns)
        for row in range(first, min(rows, first + group))
    ]


def _parts(size: int, part: int) -> list[int]:
    return [min(part, size - at) for at in range(0, size, part)]


class _Cache:
    """Least recently used, over blocks of one step of one row or column of tiles."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0
        self._blocks: collections.OrderedDict[Hashable, int] = collections.OrderedDict()

    def touch(self, key: Hashable, size: int) -> int:
        """Bytes that were not there."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return 0
        self._blocks[key] = size
        self._used += size
        while self._used > self._capacity:
            self._used -= self._blocks.popitem(last=False)[1]
        return size
