"""Tiles of the grouped products: which expert they belong to, their sums, their stores."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from interlace.gemm.kernels.tiles import multiply_tile_of, tile_place
from interlace.operators.mixture_of_experts.kernels.plan import pick


class Tiling(NamedTuple):
    """The constants that say how a product is cut into tiles.

    Attributes:
        block_m, block_n, block_k: Rows and columns of a tile, and the inner dimension of a step.
        group: Tiles of rows that share columns before the next columns.
        descriptors: Whether operands and results are tensor descriptors, or else addresses.
        precision: The input precision of ``tl.dot``, or ``"upcast"`` for the interpreter.
    """

    block_m: Any
    block_n: Any
    block_k: Any
    group: Any
    descriptors: Any
    precision: Any


@triton.jit
def tile_of(item, lanes, ends, tiles_m, shifts, tiles_n, GROUP: tl.constexpr):
    """Return the expert, the tile of rows and the tile of columns of an item.

    The rows of an expert are gone through from its shift on.
    """
    expert = tl.sum((ends <= item).to(tl.int32))
    height = pick(tiles_m, lanes, expert)
    inside = item - pick(ends, lanes, expert) + height * tiles_n
    m, n = tile_place(inside, height, tiles_n, GROUP)
    return expert, (m + pick(shifts, lanes, expert)) % height, n


@triton.jit
def multiply(
    x, w, row, end, expert, column, columns, inner, TRANSPOSED: tl.constexpr, TILING: tl.constexpr
):  # fmt: skip
    """Multiply rows of ``x [rows, inner]`` by an expert's weight: float32 ``[block_m, block_n]``.

    The tile begins at ``row`` and ``column``. ``w`` is ``[experts, columns, inner]`` if
    ``TRANSPOSED`` (as in ``nn.Linear``), else ``[experts, inner, columns]``. Rows from ``end`` on,
    and columns beyond the last, are undefined.
    """
    DESCRIPTORS: tl.constexpr = TILING.descriptors
    PRECISION: tl.constexpr = TILING.precision
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    BLOCK_K: tl.constexpr = TILING.block_k
    return multiply_tile_of(
        expert, x, w, row, column, end, columns, inner, inner, inner if TRANSPOSED else columns,
        DESCRIPTORS, TRANSPOSED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def store_rows(target, row, end, column, columns, value, DESCRIPTORS: tl.constexpr):
    """Store a tile of ``[rows, columns]``.

    With ``DESCRIPTORS``, rows from ``end`` to the tile's last are overwritten.
    """
    if DESCRIPTORS:
        target.store([row, column], value)
    else:
        m = (row + tl.arange(0, value.shape[0]))[:, None]
        n = (column + tl.arange(0, value.shape[1]))[None, :]
        tl.store(target + m.to(tl.int64) * columns + n, value, mask=(m < end) & (n < columns))
