"""Tiles of the grouped products: which expert they belong to, their sums, their stores."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.tiles import (
    SCALED, Matrices, add_product, add_step, multiply_tile_of, tile_place,
)  # fmt: skip
from interlace.operators.mixture_of_experts.kernels.plan import pick


@triton.jit
def as_operand(memory, DTYPE: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Return the tensor descriptor ``memory``, or else the pointer to the address that it is."""
    if DESCRIPTORS:
        return memory
    else:
        return il.pointer(memory, DTYPE)


@triton.jit
def tile_of(item, lanes, ends, tiles_m, shifts, tiles_n, GROUP: tl.constexpr):
    """Return the expert, the tile of rows and the tile of columns of an item.

    The rows of an expert are gone through from its shift on.
    """
    expert = tl.sum((ends <= item).to(tl.int32))
    height = pick(tiles_m, lanes, expert)
    offset = item - pick(ends, lanes, expert) + height * tiles_n
    m, n = tile_place(offset, height, tiles_n, GROUP)
    return expert, (m + pick(shifts, lanes, expert)) % height, n


@triton.jit
def multiply(x, w, row, end, expert, column, columns, inner, TILING: tl.constexpr, scales=None):
    """Multiply rows of ``x [rows, inner]`` by an expert's weight: float32 ``[block_m, block_n]``.

    The tile begins at ``row`` and ``column``. ``w`` is ``[experts, columns, inner]`` (as in
    ``nn.Linear``) if ``TILING.w_along_k``, else ``[experts, inner, columns]``. Rows from ``end``
    on, and columns beyond the last, are undefined. ``scales`` are those of blocks: those of the
    weights ``[experts, columns / 128, inner / 128]``.
    """
    w_stride = inner if TILING.w_along_k else columns
    matrices = Matrices(x, w, columns, inner, inner, w_stride)
    return multiply_tile_of(expert, matrices, row, column, end, TILING, scales)


@triton.jit
def multiply_halves(
    x, w, row, end, expert, column, width, inner, TILING: tl.constexpr, scales=None
):
    """Multiply rows of ``x [rows, inner]`` by both halves of an expert's weight at once.

    ``w`` is ``[experts, 2 * width, inner]`` if ``TILING.w_along_k``: an expert's gate, then its up;
    else ``[experts, inner, 2 * width]``. Returns two tiles, float32 ``[block_m, block_n // 2]``,
    which begin at ``row`` and at ``column`` of each half. Rows from ``end`` on, and columns from
    ``width`` on, are undefined. ``scales`` are those of blocks: those of the weights ``[experts, 2
    * width / 128, inner / 128]``.
    """
    BLOCK_M: tl.constexpr = TILING.block_m
    COLUMNS: tl.constexpr = TILING.block_n // 2
    BLOCK_K: tl.constexpr = TILING.block_k
    W_ALONG_K: tl.constexpr = TILING.w_along_k
    gate = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    up = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    # Among the lines of all experts' halves.
    first = expert * 2 * width + column
    all_lines = 2 * width
    if TILING.descriptors:
        # A tile at the end of a half reaches into the next one: columns that the store masks.
        for k in range(0, inner, BLOCK_K):
            left = x.load([row, k])
            if W_ALONG_K:
                of_gate = w.load([first, k]).T
                of_up = w.load([first + width, k]).T
            else:
                line = expert * inner + k
                of_gate = w.load([line, column])
                of_up = w.load([line, width + column])
            gate = add_step(
                gate, left, of_gate, scales, row, first, end, all_lines, inner, k, TILING
            )
            up = add_step(
                up, left, of_up, scales, row, first + width, end, all_lines, inner, k, TILING
            )
    else:
        m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, COLUMNS)
        lines = x + m.to(tl.int64)[:, None] * inner
        if W_ALONG_K:
            gates = w + (expert.to(tl.int64) * 2 * width + n)[None, :] * inner
            ups = gates + width.to(tl.int64) * inner
        else:
            gates = w + expert.to(tl.int64) * 2 * width * inner + n[None, :]
            ups = gates + width
        for k in range(0, inner, BLOCK_K):
            step = k + tl.arange(0, BLOCK_K)
            x_mask = (m < end)[:, None] & (step < inner)[None, :]
            w_mask = (step < inner)[:, None] & (n < width)[None, :]
            left = tl.load(lines + step[None, :], mask=x_mask, other=0.0)
            if W_ALONG_K:
                across = step[:, None]
            else:
                across = step.to(tl.int64)[:, None] * 2 * width
            of_gate = tl.load(gates + across, mask=w_mask, other=0.0)
            of_up = tl.load(ups + across, mask=w_mask, other=0.0)
            gate = add_step(
                gate, left, of_gate, scales, row, first, end, all_lines, inner, k, TILING
            )
            up = add_step(
                up, left, of_up, scales, row, first + width, end, all_lines, inner, k, TILING
            )
    return gate, up


@triton.jit
def multiply_gate_and_up(
    x, w, row, end, expert, column, width, inner, TILING: tl.constexpr, scales
):
    """Return what :func:`multiply_halves` does, of float8 operands that are descriptors.

    What a step adds leaves the matrix unit to be scaled, and two products of half the columns would
    do that one after the other. So the descriptor ``w [2 * experts, width, inner]`` loads columns
    of both halves, which are multiplied at once.
    """
    BLOCK_M: tl.constexpr = TILING.block_m
    COLUMNS: tl.constexpr = TILING.block_n // 2
    BLOCK_K: tl.constexpr = TILING.block_k
    blocks, m = inner // SCALED, row + tl.arange(0, BLOCK_M)
    x_scale = scales.x_scale + m * blocks
    gate_scale = scales.w_scale + (expert * 2 * width + column) // SCALED * blocks
    up_scale = gate_scale + width // SCALED * blocks
    is_gate = tl.arange(0, 2 * COLUMNS) < COLUMNS
    both = tl.zeros([BLOCK_M, 2 * COLUMNS], tl.float32)
    for k in range(0, inner, BLOCK_K):
        left = x.load([row, k])
        right = tl.reshape(w.load([2 * expert, column, k]), [2 * COLUMNS, BLOCK_K])
        # Scales arrive during the product.
        block = k // SCALED
        of_rows = tl.load(x_scale + block, mask=m < end, other=0.0)
        of_columns = tl.where(is_gate, tl.load(gate_scale + block), tl.load(up_scale + block))
        part = add_product(tl.zeros_like(both), left, right.T)
        both += part * (of_rows[:, None] * of_columns[None, :])
    return split_gate_and_up(both)


@triton.jit
def split_gate_and_up(tile):
    """Return the columns of gate and those of up, which come behind them in ``tile``."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, COLUMNS]), [0, 2, 1]))


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
