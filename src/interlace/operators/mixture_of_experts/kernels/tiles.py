"""Tiles of the grouped products: which expert they belong to, their sums, their stores."""

import triton
import triton.language as tl

from interlace.gemm.kernels.tiles import Matrices, multiply_tile_of, tile_place
from interlace.operators.mixture_of_experts.kernels.plan import pick


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
def multiply(x, w, row, end, expert, column, columns, inner, TILING: tl.constexpr):
    """Multiply rows of ``x [rows, inner]`` by an expert's weight: float32 ``[block_m, block_n]``.

    The tile begins at ``row`` and ``column``. ``w`` is ``[experts, columns, inner]`` (as in
    ``nn.Linear``) if ``TILING.w_along_k``, else ``[experts, inner, columns]``. Rows from ``end``
    on, and columns beyond the last, are undefined.
    """
    w_stride = inner if TILING.w_along_k else columns
    matrices = Matrices(x, w, columns, inner, inner, w_stride)
    return multiply_tile_of(expert, matrices, row, column, end, TILING)


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
