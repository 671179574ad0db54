"""The time that an implementation of an operator takes on a machine, predicted before it runs.

A prediction has three parts. A :class:`MachineProfile` says how long the machine takes for a
product and for the bytes that leave a rank, each by itself. A *composition*, one for every
implementation, says how these times make up the whole: an implementation that overlaps them takes
little more than the longer one, a stock pair takes their sum. *Corrections* say by how much
measured calls of similar sizes took longer or shorter than that. Compositions and corrections are
fitted to measurements (``interlace tune profile``) and shipped with the profile.

``impl="auto"`` and ``interlace.explain`` read it; the simulator reads its products' times. Nothing
here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import mul
from typing import Any, Literal, Protocol

from interlace.costs.network import NetworkRates
from interlace.costs.registry import find_cost
from interlace.units import ceil_div, round_up

Composition = Mapping[str, float]
"""Factor of each part of the time; the parts have the names that ``parts_us`` of a call gives
them.
"""

_LIBRARY_TILES = (
    (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64), (128, 192), (192, 128),
    (128, 256), (256, 128), (256, 256),
)  # fmt: skip
_LIBRARY_SPLITS = (1, 2, 3, 4, 6, 8)
_LibraryTiles = list[tuple[tuple[int, int], list[tuple[int, float]]]]
_SMALL_TILE = 64 * 64
_LARGE_TILE, _SMALLER_TILES = 128 * 256, 1.35
"""How much longer our kernels take for a product where their tiles are smaller than these, which
are the largest: 128 x 128 take 1.3 to 1.4 times as long as the library on two H200s.
"""
_K_STEP = 64
"""A tile's K is rounded up to this many elements, in the library's kernels and in ours."""


_MARGIN, _ALIKE_MARGIN, _GUESS_MARGIN = 0.03, 0.08, 0.15
"""The fraction that the times of measured profiles, of guesses from a GPU of the same architecture,
and of other guesses are often wrong by.
"""

_MOST_KNOWN = 64
"""Sizes for which a profile remembers what several implementations of a call need."""

_POINTS_PER_OCTAVE = 4
"""Points for each doubling of a call's rows between which corrections are interpolated."""

_ERROR, _GUESS_ERROR = 1.5, 3.0
"""The factor that they are seldom wrong by."""


_SECTOR_BYTES, _ACROSS_SECTORS = 32, 1.5
"""What the L2 moves at a time, and how much longer our tiles take where rows do not begin at such
sectors: with K = 5400, all-to-all, all-reduce, reduce-scatter and all-gather of 23096 x 2816 took
1.50, 1.44, 1.46 and 1.46 times as long as with 5376 on two H100s, and the library's product 1.05
(decision 0029).
"""

_LINE_BYTES = 128
_ROWS_ACROSS_SECTORS, _ROWS_ACROSS_LINES = 1.45, 1.15
"""How much longer a kernel that reads rows of a weight by their addresses takes where these do not
begin at sectors, and where they do, but not at lines of the L1: eight threads read 128 bytes, in
one line or in two. Tiles of 16 x 256 took 1.24 to 1.73 and 1.08 to 1.25 times as long as tensor
descriptors for such rows, and 0.99 to 1.05 for others, in 12 products of eight rows on an H200
(decision 0029).
"""

_PARTS_ACROSS_SECTORS = 1.15
"""How much longer the library takes for a part of a product's rows where rows do not begin at such
sectors: for both halves 0.96 to 1.7 times what it takes for the whole, in ten cases on an H100. A
profile with 1.15 chooses best at calls that it has not seen, with 1 and 1.3 worse.
"""


_BLOCK_SCALES, OWN_BLOCK_SCALES = 1.15, 1.9
"""How much longer the library, and our tiles, take for a product of float8 operands with a scale
for each block than with one for each matrix. Sums go from the matrix unit to registers and are
scaled there after each block of K, which our tiles do not do beside the next block's product: 1.04
to 1.18 and 1.7 to 2.2 times as long in five products on an H200 (decision 0031).
"""


_STAGING_US = 5.0
"""What staging rows takes beside the copy. Rows in place save 11 us more than the copy in the
median of 28 sizes on two H200s; with more than 7, calls of few rows would take what is slower.
"""


_NARROW_COLUMNS, _PROGRAM_BYTES_PER_US = 16, 21e3
"""Columns of the result, which are rows of w, that a program of a kernel for few rows has at least,
and how fast it reads them: 576 columns of 24192 elements, which 36 programs share, take 38 us on an
H100, whose memory would allow 10.
"""


_SENDS_AS = {("gemm_all_reduce_norm", name): "gemm_all_reduce" for name in ("gemm", "unfused")}
"""Implementations that send what another operator sends, as they run that one first. With two ranks
it is as much, and with more it is less than a part for each of them.
"""

Schedule = Literal[
    "whole", "by_rank", "by_peer", "tiled", "by_address", "by_slot", "by_token", "to_all"
]
"""How an implementation computes its product: one product of the library; one product of the
library after another, for each rank's rows; the same for the peers' rows, and tiles of its own
kernel for the rank's own; tiles of its own kernel, none of which covers two ranks' rows; or a
kernel that reads the weight once, by its rows' addresses. The last three are of layers of experts
and say which rows travel (:class:`interlace.costs.mixture_of_experts.ExpertsCall`).
"""


class TimedCall(Protocol):
    """The sizes of a call whose time is composed of parts."""

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element of the operands."""

    @property
    def size(self) -> tuple[int, ...]:
        """Return the sizes by which measured calls are known; the number of ranks comes last."""

    def parts_us(
        self, profile: MachineProfile, operator: str, schedule: Schedule, tile: tuple[int, int]
    ) -> dict[str, float]:
        """Return the parts of an implementation's time, in microseconds.

        Args:
            schedule: How the implementation computes its product, or what it sends.
            tile: Rows and columns of the tiles of its kernel.
        """


@dataclasses.dataclass(frozen=True)
class SizedCall:
    """The sizes of one call of an operator around a product.

    Attributes:
        rows, columns, inner: M, N and K of the product on one rank, ``x [M, K] @ w[N, K].T``. For
            an all-gather, M counts the rows of all ranks.
        itemsize: Bytes of an element of x and w.
        world_size: Number of ranks.
        output_itemsize: Bytes of an element of the result; ``itemsize`` if it is None.
        is_exact: Whether the product is of float32 without tensor cores.
        w_along_k: Whether w is contiguous along K; else it is along N.
        has_block_scales: Whether float8 operands have a scale for each block.
    """

    rows: int
    columns: int
    inner: int
    itemsize: int
    world_size: int
    output_itemsize: int | None = None
    is_exact: bool = False
    w_along_k: bool = True
    has_block_scales: bool = False

    @property
    def size(self) -> tuple[int, ...]:
        """Return the sizes by which measured calls are known."""
        return self.rows, self.columns, self.inner, self.world_size

    def parts_us(
        self, profile: MachineProfile, operator: str, schedule: Schedule, tile: tuple[int, int]
    ) -> dict[str, float]:
        """Return the parts of an implementation's time that its composition weighs, in us.

        All implementations have these: ``fixed``, 1 us; ``peers``, 1 us for every peer beyond the
        first; ``product`` and ``link``, the times of the product and of the link, each alone;
        ``longer``, the longer one of them; ``ramp``, the square root of the link's time, since
        transfers reach the link's rate by and by; ``memory``, the time to read x and w once, which
        kernels for few rows are limited by; ``narrow``, how much longer each program of such a
        kernel reads its own columns, where these are few; ``uneven``, the product's time again
        where ranks do not get equally many rows, because parts of odd sizes are multiplied and sent
        less well.
        """
        link = profile.link_us(operator, self)
        if schedule == "to_all":
            # The operator's bytes are those of a reduce-scatter and an all-gather.
            link *= self.world_size / 2
        bytes_per_us = profile.product.memory_bytes_per_s / 1e6
        rows_of_rank = ceil_div(self.rows, self.world_size)
        if schedule == "tiled":
            product = profile.own_product_us(self, tile)
        elif schedule == "by_rank":
            product = self.world_size * profile.library_product_us(self, rows_of_rank)
        elif schedule == "by_peer":
            products = (self.world_size - 1) * profile.library_product_us(self, rows_of_rank)
            product = products + min(profile.own_rows_us(self, tile).values())
        else:
            product = profile.library_product_us(self)
        memory = self.itemsize * (self.rows + self.columns) * self.inner / bytes_per_us
        if schedule == "by_address":
            longer_us = memory * (self._reading_factor() - 1)
            product, memory = product + longer_us, memory + longer_us
        program = self.itemsize * _NARROW_COLUMNS * self.inner / _PROGRAM_BYTES_PER_US
        return {
            "fixed": 1.0,
            "peers": self.world_size - 2.0,
            "product": product,
            "link": link,
            "longer": max(product, link),
            "ramp": math.sqrt(link),
            "memory": memory,
            "narrow": max(program - memory, 0.0),
            "uneven": product if self.rows % self.world_size else 0.0,
        }

    def _reading_factor(self) -> float:
        """Return how much longer a kernel reads w, which is along K, by the addresses of its rows,
        than it would if they began at lines.
        """
        row_bytes = self.inner * self.itemsize
        if row_bytes % _SECTOR_BYTES:
            return _ROWS_ACROSS_SECTORS
        return _ROWS_ACROSS_LINES if row_bytes % _LINE_BYTES else 1.0

    @staticmethod
    def of_dtype(
        dtype: str,
        rows: int,
        columns: int,
        inner: int,
        world_size: int,
        *,
        w_along_k: bool = True,
    ) -> SizedCall:
        """Return a call whose operands have a dtype, such as ``"bfloat16"``, and whose result has
        the one that comes by default.
        """
        itemsize = {"float8_e4m3fn": 1, "float32": 4}.get(dtype, 2)
        output_itemsize = 2 if itemsize == 1 else None
        return SizedCall(
            rows,
            columns,
            inner,
            itemsize,
            world_size,
            output_itemsize,
            is_exact=itemsize == 4,
            w_along_k=w_along_k,
        )


@functools.lru_cache(maxsize=4096)
def place_of(size: Sequence[int]) -> tuple[float, ...]:
    """Return the coordinates of a call, between which distances are measured: doubling a size is a
    distance of 1, and doubling the ranks, which come last, of 2. A size of 0 counts as 1.
    """
    *sizes, world_size = size
    return (*(math.log2(max(size, 1)) for size in sizes), 2 * math.log2(world_size))


def _nearness(distance: float) -> float:
    """Return how near two calls are: 1 if they are the same, 0 if they are far apart."""
    return math.exp(-(distance**2) / 2)


@dataclasses.dataclass(frozen=True)
class Corrections:
    """Correct one operator's composed times by those of measured calls of similar sizes.

    The logarithm of measured / composed has two parts. One is common to calls of similar sizes: the
    nearer a measured call is, the more it counts. The other is a call's own, and is known only for
    calls that were measured, which are predicted to take the time that they took.

    Attributes:
        calls: The sizes of the measured calls; of a product, rows, columns, inner and ranks.
        weights: For each implementation, the weight of each of these calls; 0 where it was not
            measured. A call's weight times its nearness to another one is what it says of the
            common part there, and the weight itself is the call's own part.
    """

    calls: Sequence[Sequence[int]]
    weights: Mapping[str, Sequence[float]]

    def factor(self, implementation: str, call: TimedCall) -> float:
        """Return the factor by which a composed time is to be multiplied."""
        weights = self.weights.get(implementation)
        if weights is None:
            return 1.0
        index = self._indices.get(tuple(call.size))
        weight = 0.0 if index is None else weights[index]
        return math.exp(weight) * self.common_factor(implementation, call)

    def common_factor(self, implementation: str, call: TimedCall) -> float:
        """Return the factor without the call's own part, as if the call had not been measured
        itself.
        """
        weights = self.weights.get(implementation)
        if weights is None:
            return 1.0
        first, *others = call.size
        logarithm_at = self._along_first(implementation, tuple(others))
        place, left = divmod(math.log2(max(first, 1)) * _POINTS_PER_OCTAVE, 1.0)
        before, low, high, after = (logarithm_at(place + point) for point in (-1, 0, 1, 2))
        # The cubic through four points.
        inner = (1 - left) * (2 - left) * (1 + left) / 2 * low
        inner += left * (1 + left) * (2 - left) / 2 * high
        outer = left * (1 - left) / 6 * ((2 - left) * before + (1 + left) * after)
        return math.exp(inner - outer)

    def has(self, implementation: str, call: TimedCall) -> bool:
        """Return whether an implementation was measured at a call of these sizes."""
        index = self._indices.get(tuple(call.size))
        return index is not None and any(self.weights.get(implementation, ())[index : index + 1])

    def knows(self, size: Sequence[int]) -> bool:
        """Return whether a call of these sizes was measured."""
        return tuple(size) in self._indices

    def _along_first(
        self, implementation: str, others: tuple[int, ...]
    ) -> Callable[[float], float]:
        """Return the logarithm of the common factor of calls that differ in their first size alone,
        the number of rows or tokens, at multiples of 1 / ``_POINTS_PER_OCTAVE`` of its coordinate.

        A program's calls come with hundreds of numbers of rows. The logarithm changes over octaves,
        so between points a fourth of an octave apart a cubic is right to 0.02 %, and most points
        are known.
        """
        key = implementation, others
        if key not in self._known_along_first:
            if len(self._known_along_first) >= _MOST_KNOWN:
                self._known_along_first.clear()
            nearness = self._nearness_in_others(others)
            weights = [*map(mul, self.weights[implementation], nearness)]

            @functools.cache
            def logarithm_at(point: float) -> float:
                return math.fsum(map(mul, weights, self._nearness_in_first(point)))

            self._known_along_first[key] = logarithm_at
        return self._known_along_first[key]

    def _nearness_in_others(self, others: tuple[int, ...]) -> list[float]:
        """Return how near each measured call is in all sizes but the first."""
        known = self._known_in_others
        if others not in known:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            place = place_of(others)
            known[others] = [_nearness(math.dist(place, rest)) for _, *rest in self._places]
        return known[others]

    def _nearness_in_first(self, point: float) -> list[float]:
        """Return how near each measured call is to a point of the first size's coordinate."""
        known = self._known_in_first
        if point not in known:
            at = point / _POINTS_PER_OCTAVE
            # Many measured calls have the same size.
            near = {first: _nearness(at - first) for first in {*self._first_places}}
            known[point] = [near[first] for first in self._first_places]
        return known[point]

    @functools.cached_property
    def _places(self) -> list[tuple[float, ...]]:
        return [place_of(tuple(size)) for size in self.calls]

    @functools.cached_property
    def _first_places(self) -> list[float]:
        return [first for first, *_ in self._places]

    @functools.cached_property
    def _known_along_first(
        self,
    ) -> dict[tuple[str, tuple[int, ...]], Callable[[float], float]]:
        return {}

    # What follows is the same for all implementations, which are most of what a choice asks for.
    @functools.cached_property
    def _known_in_others(self) -> dict[tuple[int, ...], list[float]]:
        return {}

    @functools.cached_property
    def _known_in_first(self) -> dict[float, list[float]]:
        return {}

    @functools.cached_property
    def _indices(self) -> dict[tuple[int, ...], int]:
        return {tuple(known): index for index, known in enumerate(self.calls)}


@dataclasses.dataclass(frozen=True)
class ProductRates:
    """Describe the speed of a GPU's matrix products.

    The library's time for a product is modelled as waves of tiles: the GPU's processors compute one
    tile each at a time, of the shape and with the split of K that take the least time.

    Attributes:
        flops_per_s: Dense FLOPs per second of 16-bit operands that large tiles reach.
        memory_bytes_per_s: Bytes per second that operands and results are read and written with.
        small_tile_efficiency: Fraction of ``flops_per_s`` that tiles of 64 x 64 reach.
        launch_us: Time of a product that is nearly empty.
        tile_us: Time of a tile beside its multiplications.
        split_us: Time of adding up the parts, where K is split.
        float32_flops_per_s: FLOPs per second of float32 operands without tensor cores, in the
            library's kernels.
        own_float32_flops_per_s: The same in ours, which are not made for that.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    small_tile_efficiency: float
    launch_us: float
    tile_us: float
    split_us: float
    float32_flops_per_s: float
    own_float32_flops_per_s: float


def in_order(times_us: Mapping[str, float], pairs: Collection[str], margin: float) -> list[str]:
    """Return implementations by their times, the shortest first, where a pair comes before what is
    hardly shorter.

    Args:
        times_us: Times by implementation.
        pairs: Names of those that are stock pairs.
        margin: The fraction by which others must be shorter.
    """
    return sorted(
        times_us, key=lambda name: times_us[name] * (1 - margin if name in pairs else 1.0)
    )


@dataclasses.dataclass(frozen=True)
class MachineProfile:
    """A GPU, its links, and how implementations compose the times of both.

    Attributes:
        gpu: The GPU's name, as ``torch.cuda.get_device_name`` has it.
        source: Where the figures come from.
        results: Names of the files of results to which the compositions were fitted.
        processors: Number of streaming multiprocessors.
        product: Rates of products.
        link_bytes_per_s: Bytes per second that leave a GPU for all its peers together.
        compositions: The composition of each implementation for 16-bit operands, by operator and
            name.
        other_compositions: Those for operands of other sizes, by the bytes of an element; what is
            missing is as for 16-bit operands.
        corrections: What measured calls of 16-bit operands say beside the compositions, by
            operator.
        is_guess: Whether the figures are another GPU's, scaled.
        is_alike: Of a guess, whether that GPU has the same architecture, and links of a like rate.
        network: The network between nodes; None where none was measured.
    """

    gpu: str
    source: str
    processors: int
    product: ProductRates
    link_bytes_per_s: float
    compositions: Mapping[str, Mapping[str, Composition]]
    other_compositions: Mapping[str, Mapping[str, Mapping[str, Composition]]] = dataclasses.field(
        default_factory=dict
    )
    corrections: Mapping[str, Corrections] = dataclasses.field(default_factory=dict)
    results: Sequence[str] = ()
    is_guess: bool = False
    is_alike: bool = False
    network: NetworkRates | None = None

    @property
    def margin(self) -> float:
        """The fraction by which a predicted time must be below those of the stock pairs.

        A pair that is taken without need costs less than a pair that is missed.
        """
        if not self.is_guess:
            return _MARGIN
        return _ALIKE_MARGIN if self.is_alike else _GUESS_MARGIN

    @property
    def measured_ranks(self) -> list[int]:
        """The numbers of ranks with which calls of operators were measured on the GPU."""
        known = (call for correction in self.corrections.values() for call in correction.calls)
        return sorted({ranks for *_, ranks in known})

    def basis(self, operator: str, implementation: str, call: TimedCall) -> str:
        """Return what a predicted time goes by: ``"measured"`` if a call of these sizes was, on
        this GPU and of 16-bit operands; ``"predicted"``; or ``"guessed"`` from another GPU.
        """
        corrections = self.corrections.get(operator)
        if corrections is not None and call.itemsize == 2 and corrections.has(implementation, call):
            return "measured"
        return "guessed" if self.is_guess else "predicted"

    @property
    def worst_error(self) -> float:
        """The factor by which a predicted time may be wrong; what is nearer is worth measuring."""
        return _GUESS_ERROR if self.is_guess else _ERROR

    def in_order(self, times_us: Mapping[str, float], pairs: Collection[str]) -> list[str]:
        """Return implementations in the order of their predicted times; see :func:`in_order`."""
        return in_order(times_us, pairs, self.margin)

    def tile_us(self, block_m: int, block_n: int, inner: int, flops_per_s: float) -> float:
        """Return how long a processor takes for one tile of a product, in microseconds.

        Args:
            flops_per_s: FLOPs per second of all processors together.
        """
        flops_per_us = flops_per_s / 1e6 / self.processors
        if block_m * block_n <= _SMALL_TILE:
            flops_per_us *= self.product.small_tile_efficiency
        flops = 2 * block_m * block_n * round_up(inner, _K_STEP)
        return flops / flops_per_us + self.product.tile_us

    def flops_per_s(self, call: SizedCall, *, own: bool = False) -> float:
        """Return the FLOPs per second of large tiles of a call's product.

        Args:
            own: In our kernels, not the library's.
        """
        if call.is_exact:
            rates = self.product
            return rates.own_float32_flops_per_s if own else rates.float32_flops_per_s
        # Tensor cores multiply 8-bit operands twice as fast as 16-bit ones.
        flops_per_s = self.product.flops_per_s * 2 / call.itemsize
        if call.has_block_scales:
            flops_per_s /= OWN_BLOCK_SCALES if own else _BLOCK_SCALES
        return flops_per_s

    def library_product_us(
        self, call: SizedCall, rows: int | None = None, products: int = 1
    ) -> float:
        """Return how long the library takes for a call's product, in microseconds.

        Args:
            rows: Rows of the product, if they are not all of the call's.
            products: Number of such products with the same w, as one batch.
        """
        rows, columns, inner = call.rows if rows is None else rows, call.columns, call.inner
        bytes_per_us = self.product.memory_bytes_per_s / 1e6
        results = products * rows * columns
        flops_per_s = self.flops_per_s(call)
        # Plain loops: this takes most of the time of a choice, which each new number of rows needs.
        shortest, processors = math.inf, self.processors
        for (block_m, block_n), tile_us_by_split in self._library_tiles(inner, flops_per_s):
            tiles = products * ceil_div(rows, block_m) * ceil_div(columns, block_n)
            # No split takes less than whole tiles on processors that are never idle, and the sum of
            # its parts.
            least, adding_us = tiles * tile_us_by_split[0][1] / processors, 0.0
            for split, tile_us in tile_us_by_split:
                if split > 1:
                    adding_us = self.product.split_us + 4 * split * results / bytes_per_us
                if least + adding_us >= shortest:
                    break
                shortest = min(shortest, ceil_div(tiles * split, processors) * tile_us + adding_us)
        # The products of a batch follow one another, and the cache seldom holds all of w.
        read_elements = products * (rows + columns) * inner
        output_itemsize = call.output_itemsize or call.itemsize
        moved_bytes = call.itemsize * read_elements + output_itemsize * results
        us = max(shortest, moved_bytes / bytes_per_us)
        if rows != call.rows and inner * call.itemsize % _SECTOR_BYTES:
            us *= _PARTS_ACROSS_SECTORS
        return self.product.launch_us + us

    def _library_tiles(self, inner: int, flops_per_s: float) -> _LibraryTiles:
        """Return rows and columns of each tile that the library may take for a product with this K,
        and what the tile takes in microseconds by the splits of K.
        """
        tiles = self._known_tiles.get((inner, flops_per_s))
        if tiles is None:
            tiles = [
                (
                    tile,
                    [
                        (split, self.tile_us(*tile, ceil_div(inner, split), flops_per_s))
                        for split in _LIBRARY_SPLITS
                    ],
                )
                for tile in reversed(_LIBRARY_TILES)  # the largest, which are mostly fastest, first
            ]
            if len(self._known_tiles) >= _MOST_KNOWN:
                self._known_tiles.clear()
            self._known_tiles[inner, flops_per_s] = tiles
        return tiles

    @functools.cached_property
    def _known_tiles(self) -> dict[tuple[int, float], _LibraryTiles]:
        return {}

    def own_product_us(
        self, call: SizedCall, tile: tuple[int, int], *, ranks: int | None = None, products: int = 1
    ) -> float:
        """Return how long our kernels' tiles take for a call's product, in microseconds, without
        the launch. No tile covers two ranks' rows.

        Args:
            tile: Rows and columns of a tile.
            ranks: Number of ranks whose rows are computed; all of them by default.
            products: Number of such products in one kernel.
        """
        block_m, block_n = tile
        ranks = call.world_size if ranks is None else ranks
        tiles_of_rank = ceil_div(ceil_div(call.rows, call.world_size), block_m)
        tiles = products * ranks * tiles_of_rank * ceil_div(call.columns, block_n)
        waves = ceil_div(tiles, self.processors)
        flops_per_s = self.flops_per_s(call, own=True)
        rows_of_operands = call.inner, call.inner if call.w_along_k else call.columns
        if any(elements * call.itemsize % _SECTOR_BYTES for elements in rows_of_operands):
            flops_per_s /= _ACROSS_SECTORS
        return waves * self.tile_us(block_m, block_n, call.inner, flops_per_s)

    def own_rows_us(self, call: SizedCall, tile: tuple[int, int]) -> dict[str, float]:
        """Return how long a rank takes for its own rows of a sum over ranks whose other parts have
        come, in microseconds: by ``"kernel"``, which multiplies them in tiles and adds the parts to
        each; and by ``"library"``, whose product a kernel then adds to the parts.

        Args:
            tile: Rows and columns of the kernel's tiles.
        """
        rows = ceil_div(call.rows, call.world_size)
        itemsize = call.output_itemsize or call.itemsize
        # Reads every rank's part and writes the sum.
        moved_bytes = (call.world_size + 1) * rows * call.columns * itemsize
        adding_us = self.product.launch_us + moved_bytes / self.product.memory_bytes_per_s * 1e6
        kernel_us = self.own_product_us(call, tile, ranks=1)
        if tile[0] * tile[1] < _LARGE_TILE:
            kernel_us *= _SMALLER_TILES
        return {
            "kernel": kernel_us,
            "library": self.library_product_us(call, rows) + adding_us,
        }

    def link_us(self, operator: str, call: SizedCall) -> float:
        """Return how long the bytes that an operator's call sends are on their way, in us."""
        cost = find_cost(operator).formula(
            rows=call.rows,
            columns=call.columns,
            inner=call.inner,
            itemsize=call.itemsize,
            world_size=call.world_size,
            output_itemsize=call.output_itemsize,
        )
        return float(cost.link_bytes) / self.link_bytes_per_s * 1e6

    def least_link_us(self, operator: str, call: SizedCall) -> float:
        """Return how long the bytes of the implementations that send least are on their way, in
        microseconds.
        """
        sent = {operator, *(as_ for (name, _), as_ in _SENDS_AS.items() if name == operator)}
        return min(self.link_us(name, call) for name in sent)

    def staging_us(self, call: SizedCall) -> float:
        """Return how much longer a call takes whose rows are copied to where peers may fetch them
        than one whose rows lie there, in us.
        """
        own_bytes = ceil_div(call.rows, call.world_size) * call.inner * call.itemsize
        return _STAGING_US + 2 * own_bytes / self.product.memory_bytes_per_s * 1e6

    def composition(self, operator: str, implementation: str, itemsize: int) -> Composition | None:
        """Return the composition of an implementation, or None if the profile has none."""
        special = self.other_compositions.get(str(itemsize), {})
        for compositions in (special, self.compositions):
            composition = compositions.get(operator, {}).get(implementation)
            if composition is not None:
                return composition
        return None

    def _parts_us(
        self, operator: str, call: TimedCall, schedule: Schedule, tile: tuple[int, int]
    ) -> Mapping[str, float]:
        """Return the parts of a call's time; implementations with one schedule share them."""
        key = operator, call, schedule, tile
        parts_us = self._known_parts.get(key)
        if parts_us is None:
            if len(self._known_parts) >= _MOST_KNOWN:
                self._known_parts.clear()
            parts_us = self._known_parts[key] = call.parts_us(self, operator, schedule, tile)
        return parts_us

    @functools.cached_property
    def _known_parts(self) -> dict[Any, Mapping[str, float]]:
        return {}

    def predict_us(
        self,
        operator: str,
        implementation: str,
        call: TimedCall,
        schedule: Schedule,
        tile: tuple[int, int],
    ) -> float | None:
        """Return how long an implementation takes for a call, in microseconds.

        Args:
            schedule: How the implementation computes its product.
            tile: Rows and columns of the tiles of a tiled schedule.

        Returns:
            The time; None if the profile has no composition for the implementation.
        """
        composition = self.composition(operator, implementation, call.itemsize)
        if composition is None:
            return None
        sends_as = _SENDS_AS.get((operator, implementation), operator)
        parts = self._parts_us(sends_as, call, schedule, tile)
        composed = sum(factor * parts[name] for name, factor in composition.items())
        corrections = self.corrections.get(operator)
        # The measured calls were of 16-bit operands.
        if corrections is None or call.itemsize != 2:
            return composed
        return composed * corrections.factor(implementation, call)
