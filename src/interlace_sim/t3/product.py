"""The run of a matrix product on a GPU: a tile on each compute unit, step by step, with its reads
and stores.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from interlace.errors import ConfigError
from interlace.units import ceil_div
from interlace_sim.engine import Server, duration_ns
from interlace_sim.results import Span
from interlace_sim.t3.gpu import Cause, Gpu, Store
from interlace_sim.t3.machine import T3Machine

ELEMENT_BYTES = 2
"""Bytes of an fp16 element, as in the paper."""
OUTPUT_RUN_BYTES = 256
"""Contiguous bytes of an output: a row of a tile."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A product ``[rows, depth] @ [depth, columns]`` in fp16 on each GPU.

    Every GPU has a partial sum of ``[rows, columns]``.

    Raises:
        ConfigError: a size is below 1.
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
        """Bytes of the first input."""
        return ELEMENT_BYTES * self.depth * self.rows

    @property
    def output_bytes(self) -> int:
        return ELEMENT_BYTES * self.rows * self.columns


class Plan:
    """The layout of a product on compute units: tiles in an order, of several steps each along the
    inner dimension.

    Attributes:
        tiles: (row, column) in the order in which they start.
        heights, widths, depths: Elements of each row and column of tiles, and of each step.
        part_rows: Rows of tiles in each part of the rows.
        step_ns: Nanoseconds of a step on one compute unit, once its inputs have arrived.
        run_bytes: Contiguous bytes of an input: rows and columns run along the inner dimension, as
            in linear layers.
    """

    def __init__(self, machine: T3Machine, product: Product, row_parts: int = 1) -> None:
        """Lay out a product.

        Args:
            machine: The compute units and their tiles.
            product: The product.
            row_parts: Number of equal parts of the rows (the shards of a gathered input), whose
                borders no tile crosses.
        """
        gpu = machine.gpu
        tile_rows, tile_columns, k_step = (
            int(gpu.tile_rows.value),
            int(gpu.tile_columns.value),
            int(gpu.k_step.value),
        )
        tiles = ceil_div(product.rows, tile_rows) * ceil_div(product.columns, tile_columns)
        if tiles > _MOST_TILES or product.depth // k_step > _MOST_TILES:
            raise ConfigError(
                f"a product must have at most {_MOST_TILES} tiles, and steps of a tile; "
                f"{product.rows} x {product.columns} x {product.depth} has more. Take a part of it."
            )
        self.product = product
        # The last tile of a part may be lower, as the rows need not divide.
        self.heights = _parts(product.rows // row_parts, tile_rows) * row_parts
        self.widths, self.depths = (
            _parts(product.columns, tile_columns),
            _parts(product.depth, k_step),
        )
        self.part_rows = len(self.heights) // row_parts
        self.tiles = _order(
            len(self.heights), len(self.widths), min(int(gpu.group_rows.value), self.part_rows)
        )
        # FLOPs per second of one compute unit.
        unit = gpu.clock_hz.value * gpu.flops_per_clock.value * gpu.efficiency.value
        self.step_ns = round(1e9 * 2 * tile_rows * tile_columns * k_step / unit)
        self.run_bytes = ELEMENT_BYTES * k_step

    def output_bytes(self, tile: int) -> int:
        """Return the bytes of a tile's output."""
        row, column = self.tiles[tile]
        return ELEMENT_BYTES * self.heights[row] * self.widths[column]


_MOST_TILES = 2**18


def _order(rows: int, columns: int, group: int) -> list[tuple[int, int]]:
    """List tiles down ``group`` rows, then in the next column; then in the next group of rows."""
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
    """A tile on its compute unit.

    Attributes:
        step: Step that is computed, or computed next.
        loaded: Number of steps whose inputs have arrived.
        awaited: Inputs of the next step that have not arrived.
        since_ns: Time at which its unit took it, finished it, or was told that it is stored.
    """

    number: int
    row: int
    column: int
    since_ns: int
    step: int = 0
    loaded: int = 0
    awaited: int = 0
    computing: bool = False


class Running:
    """A product that runs. Every compute unit works on a tile, and takes the next tile when its
    stores are acknowledged.

    A step's inputs are read while the step before it is computed, but not across tiles. They come
    from the last-level cache, which evicts the least recently used of its blocks; a block is one
    step of one row or column of tiles. A block that is being read is waited for, not read again.
    All loads and stores of compute units cross the cache's port, one after the other.

    Without ``store`` the outputs go into that cache, which writes them back when it needs room, and
    in the end.
    """

    def __init__(
        self,
        gpu: Gpu,
        plan: Plan,
        units: int,
        store: Callable[[int, Callable[[Store], None]], None] | None = None,
        *,
        gate: Callable[[int, Callable[[], None]], None] | None = None,
        stage_done: Callable[[], None] | None = None,
        slowness: float = 1.0,
    ) -> None:
        """Start a product; its events are the engine's.

        Args:
            gpu: The GPU.
            plan: The product's layout.
            units: Compute units that take tiles.
            store: Called with a tile's number, and a function to call with the destination when
                the tile's stores are acknowledged.
            gate: Called with the row of a tile, and a function to call when its input has arrived.
            stage_done: Called once, when the first ``units`` tiles are done.
            slowness: Time of a step over the plan's.
        """
        self._gpu, self._plan, self._units = gpu, plan, units
        self._store, self._gate, self._stage_done = store, gate, stage_done
        self._step_ns = round(plan.step_ns * slowness)
        self._port = Server("cache")
        self._port_rate = gpu.machine.memory.cache_bytes_per_s.value
        self._capacity = int(gpu.machine.memory.cache_bytes.value)
        self._used = 0
        # Bytes of each block. Blocks of rows, of columns and of outputs are numbered 0, 1 and 2
        # modulo 3.
        self._cache: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._coming: dict[int, list[_Tile]] = {}
        self._next = self._done = 0
        self._stored: list[_Tile] = []
        self._lockstep = bool(gpu.machine.gpu.lockstep.value)
        self._began: list[int] = []
        for _ in range(min(units, len(plan.tiles))):
            self._take()

    def _take(self) -> None:
        """Let a compute unit take the next tile."""
        if self._next == len(self._plan.tiles):
            return
        # Tiles start in the plan's order, whichever unit is free first.
        tile = _Tile(self._next, *self._plan.tiles[self._next], self._gpu.engine.now)
        # Stages are counted by tiles: the first tile of each marks its begin.
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
        # Besides its blocks, a step waits for their way through the cache's port.
        tile.awaited = 1
        self._touch(tile, 3 * (tile.row * steps + step), rows_bytes)
        self._touch(tile, 3 * (tile.column * steps + step) + 1, columns_bytes)
        self._cross(rows_bytes + columns_bytes, lambda: self._ready(tile))

    def _cross(self, size: int, crossed: Callable[[], None]) -> None:
        """Move bytes between compute units and cache, and call ``crossed()``."""
        engine = self._gpu.engine
        duration = duration_ns(size, self._port_rate)
        engine.at(self._port.reserve(engine.now, duration) + duration, crossed)

    def _touch(self, tile: _Tile, block: int, size: int) -> None:
        if block in self._coming:
            tile.awaited += 1
            self._coming[block].append(tile)
        elif block in self._cache:
            self._cache.move_to_end(block)
        else:
            tile.awaited += 1
            self._coming[block] = [tile]
            self._keep(block, size)
            self._gpu.memory.request(
                "compute",
                "product",
                "read",
                size,
                lambda: self._arrived(block),
                self._plan.run_bytes,
            )

    def _arrived(self, block: int) -> None:
        for tile in self._coming.pop(block):
            self._ready(tile)

    def _keep(self, block: int, size: int) -> None:
        """Keep a block in the cache; outputs that must leave it are written back."""
        self._cache[block] = size
        self._used += size
        while self._used > self._capacity and len(self._cache) > 1:
            self._evict()

    def _evict(self) -> None:
        block, size = self._cache.popitem(last=False)
        self._used -= size
        # Inputs are in DRAM already.
        if block % 3 == 2:
            self._gpu.memory.request(
                "compute", "product", "write", size, _nothing, OUTPUT_RUN_BYTES
            )

    def _ready(self, tile: _Tile) -> None:
        tile.awaited -= 1
        if tile.awaited == 0:
            tile.loaded += 1
            self._compute(tile)

    def _compute(self, tile: _Tile) -> None:
        if tile.computing or tile.loaded <= tile.step:
            return
        tile.computing = True
        self._gpu.engine.after(self._step_ns, self._computed, tile)
        # The next step's inputs are asked for as this one starts: two steps fit into a unit.
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
        computing = len(self._plan.depths) * self._step_ns
        self._spent("computing", computing)
        self._spent("inputs", now - tile.since_ns - computing)
        tile.since_ns = now
        if self._done % self._units == 0 or self._done == len(self._plan.tiles):
            stage = (self._done - 1) // self._units
            self._gpu.spans.append(
                Span("compute", f"product, stage {stage}", self._began[stage], now)
            )
            if stage == 0 and self._stage_done is not None:
                self._stage_done()
        self._gpu.product_ns = now
        if self._done == len(self._plan.tiles):
            # What is left of the units' time is that of units without a tile.
            self._spent("idle", self._units * now - sum(self._gpu.unit_ns.values()))
        if self._store is not None:
            self._store(tile.number, lambda target: self._released(tile, target))
            return
        self._keep(3 * tile.number + 2, self._plan.output_bytes(tile.number))
        if self._done == len(self._plan.tiles):
            # Output that is left is written back, and counted, after the last tile.
            while self._cache:
                self._evict()
        self._released(tile, "memory")

    def _released(self, tile: _Tile, target: Store) -> None:
        """Free a compute unit; it takes the next tile unless it waits for its stage to end."""
        now, total = self._gpu.engine.now, len(self._plan.tiles)
        # A unit that gets no further tile waits for nothing: it is idle.
        if self._next < total:
            self._spent(target, now - tile.since_ns)
        tile.since_ns = now
        self._stored.append(tile)
        # In lockstep a unit waits until all tiles of its stage have been stored.
        if self._lockstep and self._next % self._units == 0 and len(self._stored) < self._units:
            return
        stored, self._stored = self._stored, []
        for other in stored:
            if self._next < total:
                self._spent("stage", now - other.since_ns)
            self._take()

    def _spent(self, cause: Cause, unit_ns: int) -> None:
        """Count the time of one compute unit."""
        self._gpu.unit_ns[cause] = self._gpu.unit_ns.get(cause, 0) + unit_ns


def _nothing() -> None:
    """Do nothing: no tile waits for a write-back."""
