"""A matrix product as a GPU runs it: a tile on each compute unit, step by step, with its reads and
its stores.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from interlace.errors import ConfigError
from interlace.sim.engine import Server, duration_ns
from interlace.sim.results import Span
from interlace.sim.t3.gpu import Gpu
from interlace.sim.t3.machine import T3Machine

ELEMENT_BYTES = 2
"""fp16, as in the paper."""
OUTPUT_RUN_BYTES = 256
"""Of an output that lie together: a row of a tile."""


@dataclasses.dataclass(frozen=True)
class Product:
    """``[rows, depth] @ [depth, columns]`` in fp16, a partial sum of ``[rows, columns]`` on each
    GPU.

    Raises:
        ConfigError: a size below 1.
    """

    name: str
    rows: int
    columns: int
    depth: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.depth) < 1:
            raise ConfigError(
                f"sizes of a product must be at least 1; got {self.rows} x {self.columns} x "
                f"{self.depth}."
            )

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.depth

    @property
    def gathered_bytes(self) -> int:
        """Of the first input."""
        return ELEMENT_BYTES * self.depth * self.rows

    @property
    def output_bytes(self) -> int:
        return ELEMENT_BYTES * self.rows * self.columns


class Plan:
    """How a product is laid on compute units: tiles in an order, each a number of steps along the
    inner dimension.

    Attributes:
        tiles: (row, column) in the order in which they start.
        heights, widths, depths: elements of each row and column of tiles, and of each step.
        step_ns: time of a step on one compute unit, inputs being there.
        run_bytes: of an input, that lie together: rows and columns run along the inner dimension,
            as linear layers have them.
    """

    def __init__(self, machine: T3Machine, product: Product, row_parts: int = 1) -> None:
        """Args: row_parts: equal parts of the rows, one after the other (the shards of a gathered
        input); tiles do not cross them.
        """
        gpu = machine.gpu
        tile_rows, tile_columns, k_step = (
            int(gpu.tile_rows.value),
            int(gpu.tile_columns.value),
            int(gpu.k_step.value),
        )
        self.product = product
        self.heights = _parts(product.rows // row_parts, tile_rows) * row_parts
        self.widths, self.depths = (
            _parts(product.columns, tile_columns),
            _parts(product.depth, k_step),
        )
        self.part_rows = len(self.heights) // row_parts
        self.tiles = _order(
            len(self.heights), len(self.widths), min(int(gpu.group_rows.value), self.part_rows)
        )
        unit = gpu.clock_hz.value * gpu.flops_per_clock.value * gpu.efficiency.value
        self.step_ns = round(1e9 * 2 * tile_rows * tile_columns * k_step / unit)
        self.run_bytes = ELEMENT_BYTES * k_step

    def output_bytes(self, tile: int) -> int:
        row, column = self.tiles[tile]
        return ELEMENT_BYTES * self.heights[row] * self.widths[column]


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


@dataclasses.dataclass(slots=True)
class _Tile:
    """A tile on its compute unit."""

    number: int
    row: int
    column: int
    step: int = 0
    loaded: int = 0
    missing: int = 0
    computing: bool = False


class Running:
    """A product on its way. Every compute unit works on a tile; when the tile's stores are
    acknowledged it takes the next one.

    A step's inputs are read while the one before is computed, not across tiles. They come from the
    last-level cache, least recently used, in blocks of one step of one row or column of tiles; a
    block that is on its way is waited for, not read again. All that compute units load and store
    crosses the cache's port, one after the other.

    Without ``store`` the outputs go into that cache, which writes them back when it needs the room,
    and the rest in the end.
    """

    def __init__(
        self,
        gpu: Gpu,
        plan: Plan,
        units: int,
        store: Callable[[int, Callable[[], None]], None] | None = None,
        *,
        gate: Callable[[int, Callable[[], None]], None] | None = None,
        stage_done: Callable[[], None] | None = None,
        slowness: float = 1.0,
    ) -> None:
        """Args:
        store: called with a tile's number and what to call when its stores are acknowledged.
        gate: called with the row of a tile and what to call when its input is there.
        stage_done: called when as many tiles as there are units are done, for the first time.
        slowness: time of a step over the plan's.
        """
        self._gpu, self._plan, self._units = gpu, plan, units
        self._store, self._gate, self._stage_done = store, gate, stage_done
        self._step_ns = round(plan.step_ns * slowness)
        self._port = Server("cache", "memory")
        self._port_rate = gpu.machine.memory.cache_bytes_per_s.value
        self._capacity = int(gpu.machine.memory.cache_bytes.value)
        self._used = 0
        self._cache: collections.OrderedDict[int, int] = collections.OrderedDict()  # block -> bytes
        self._coming: dict[int, list[_Tile]] = {}
        self._next = self._done = self._free = 0
        self._lockstep = bool(gpu.machine.gpu.lockstep.value)
        self._began: list[int] = []
        for _ in range(min(units, len(plan.tiles))):
            self._take()

    def _take(self) -> None:
        """A compute unit takes the next tile."""
        if self._next == len(self._plan.tiles):
            return
        tile = _Tile(self._next, *self._plan.tiles[self._next])
        if self._next % self._units == 0:
            self._began.append(self._gpu.engine.now)
        self._next += 1
        if self._gate is None:
            self._load(tile)
        else:
            self._gate(tile.row, lambda: self._load(tile))

    def _load(self, tile: _Tile) -> None:
        """Ask for the inputs of the step after the last one that is loaded."""
        plan, steps, step = self._plan, len(self._plan.depths), tile.loaded
        depth = ELEMENT_BYTES * plan.depths[step]
        rows_bytes, columns_bytes = depth * plan.heights[tile.row], depth * plan.widths[tile.column]
        tile.missing = 1
        self._touch(tile, 3 * (tile.row * steps + step), rows_bytes)
        self._touch(tile, 3 * (tile.column * steps + step) + 1, columns_bytes)
        self._cross(rows_bytes + columns_bytes, lambda: self._ready(tile))

    def _cross(self, size: int, then: Callable[[], None]) -> None:
        """Between compute units and cache."""
        engine = self._gpu.engine
        duration = duration_ns(size, self._port_rate)
        engine.at(self._port.reserve(engine.now, duration) + duration, then)

    def _touch(self, tile: _Tile, block: int, size: int) -> None:
        if block in self._coming:
            tile.missing += 1
            self._coming[block].append(tile)
        elif block in self._cache:
            self._cache.move_to_end(block)
        else:
            tile.missing += 1
            self._coming[block] = [tile]
            self._keep(block, size)
            self._gpu.memory.request(
                "compute", "product", "read", size, lambda: self._came(block), self._plan.run_bytes
            )

    def _came(self, block: int) -> None:
        for tile in self._coming.pop(block):
            self._ready(tile)

    def _keep(self, block: int, size: int) -> None:
        """In the cache; what has to leave it for that is written back if it is an output."""
        self._cache[block] = size
        self._used += size
        while self._used > self._capacity and len(self._cache) > 1:
            self._evict()

    def _evict(self) -> None:
        block, size = self._cache.popitem(last=False)
        self._used -= size
        if block % 3 == 2:
            self._gpu.memory.request(
                "compute", "product", "write", size, _nothing, OUTPUT_RUN_BYTES
            )

    def _ready(self, tile: _Tile) -> None:
        tile.missing -= 1
        if tile.missing == 0:
            tile.loaded += 1
            self._compute(tile)

    def _compute(self, tile: _Tile) -> None:
        if tile.computing or tile.loaded <= tile.step:
            return
        tile.computing = True
        self._gpu.engine.after(self._step_ns, self._computed, tile)
        if tile.loaded < len(self._plan.depths):
            self._load(tile)

    def _computed(self, tile: _Tile) -> None:
        tile.computing = False
        tile.step += 1
        if tile.step < len(self._plan.depths):
            self._compute(tile)
            return
        self._cross(self._plan.output_bytes(tile.number), lambda: self._finished(tile))

    def _finished(self, tile: _Tile) -> None:
        self._done += 1
        now = self._gpu.engine.now
        if self._done % self._units == 0 or self._done == len(self._plan.tiles):
            stage = (self._done - 1) // self._units
            self._gpu.spans.append(
                Span("compute", f"product, stage {stage}", self._began[stage], now)
            )
            if stage == 0 and self._stage_done is not None:
                self._stage_done()
        self._gpu.product_ns = now
        if self._store is not None:
            self._store(tile.number, self._released)
            return
        self._keep(3 * tile.number + 2, self._plan.output_bytes(tile.number))
        if self._done == len(self._plan.tiles):
            while self._cache:
                self._evict()
        self._released()

    def _released(self) -> None:
        """A compute unit is free."""
        self._free += 1
        if self._lockstep and self._next % self._units == 0 and self._free < self._units:
            return
        free, self._free = self._free, 0
        for _ in range(free):
            self._take()


def _nothing() -> None:
    """Nobody waits for a write-back."""
