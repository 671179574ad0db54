"""Tiles of a matrix product, for the kernels of the operators around one."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.language.tree import add_to_tree


SCALED = tl.constexpr(SCALE_BLOCK)  # elements of K, and rows of w, that share a scale of a block


class Tiling(NamedTuple):
    """The constants that say how a kernel cuts its product into tiles.

    Attributes:
        block_m, block_n, block_k: Rows and columns of a tile, and the inner dimension of a step.
        group_m: Rows of tiles that are computed together, so that weights stay in the L2.
        descriptors: Whether x and w are tensor descriptors, or else pointers.
        w_along_k: Whether w is contiguous along K, or else along N.
        factor: Of the operands' sizes and strides; see ``il.multiple_of``.
        leaves: Parts of K whose sums are added in a tree of pairs; 1 to add along all of K.
        node: Triton's name of the dtype to which sums in that tree are rounded.
        block_scales: Of float8 operands with scales of blocks, the one of them, ``"x"`` or ``"w"``,
            whose every row has a scale for each 128 elements of K, where the other one has it for
            128 rows; empty if scales are of rows or matrices, or there are none.
    """

    block_m: Any
    block_n: Any
    block_k: Any
    group_m: Any
    descriptors: Any
    w_along_k: Any
    factor: Any = 1
    leaves: Any = 1
    node: Any = "fp32"
    block_scales: Any = ""


class Sending(NamedTuple):
    """The constants that say how a kernel's tiles travel.

    Attributes:
        world_size: The number of ranks.
        dtype: Triton's name of the result's dtype, such as ``"bf16"``; what travels has it, too.
        align: Elements of the result in 16 bytes: row strides are multiples of it.
        tile_stores: Whether tiles travel by copies out of shared memory, or else by stores.
        interleave: Tiles for one rank before the next rank's turn; see ``GemmConfig.interleave``.
        in_rank_order: Whether a sum has the same bits whichever rank computes it: every part is
            rounded, this rank's own too, and all are added in rank order.
        in_tree: Whether they are added in a tree of pairs instead; see :func:`add_to_tree`.
    """

    world_size: Any
    dtype: Any
    align: Any
    tile_stores: Any
    interleave: Any
    in_rank_order: Any
    in_tree: Any = False


class Matrices(NamedTuple):
    """The operands of ``x [M, K] @ w[N, K].T``.

    Attributes:
        x, w: Tensor descriptors or pointers; see ``Tiling.descriptors``. With several
            ``Tiling.leaves`` the first dimension of descriptors is the leaf.
        N, K: Columns of the result, and the inner dimension.
        x_stride: Elements between two rows of x.
        w_stride: Elements between two rows of w, or two columns if it is contiguous along N.
    """

    x: Any
    w: Any
    N: Any
    K: Any
    x_stride: Any
    w_stride: Any


class Scales(NamedTuple):
    """The factors of float8 operands; None for other dtypes.

    Attributes:
        x_scale, w_scale: Pointers to float32.
        x_stride, w_stride: 1 for a scale per row of the operand, 0 for one in all. Scales of blocks
            lie as ``[rows or blocks of them, ceil(K / 128)]``, contiguous, and need no strides.
    """

    x_scale: Any
    w_scale: Any
    x_stride: Any
    w_stride: Any


@triton.jit
def padded_stride(columns, ALIGN: tl.constexpr):
    """Return the elements from one row to the next of a matrix whose rows are padded.

    Args:
        ALIGN: Elements in 16 bytes: every row begins at a multiple of 16 bytes.
    """
    return (columns + ALIGN - 1) // ALIGN * ALIGN


@triton.jit
def tile_place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return row and column of a tile among ``tiles_m x tiles_n``.

    Tiles are numbered ``GROUP_M`` rows at a time, so that neighbours share operands in the L2.
    """
    width = GROUP_M * tiles_n
    first = tile // width * GROUP_M
    # A tile beyond the last one is outside of the result, but its place must not divide by zero.
    height = tl.maximum(tl.minimum(tiles_m - first, GROUP_M), 1)
    return first + tile % width % height, tile % width // height


@triton.jit
def multiply_tile(
    matrices, row, column, rows, TILING: tl.constexpr, w_first=0, scales=None, waiting=None
):
    """Return ``x[row :] @ w[column :].T``, float32 ``[block_m, block_n]``, times scales of blocks.

    K is added from its beginning to its end, or with several ``TILING.leaves`` each leaf of it, and
    leaves in a tree of pairs; see :func:`add_to_tree`.

    Args:
        rows: Rows of x; rows of the result beyond them are undefined.
        w_first: Where K begins in a descriptor of several weights, one behind the other, if w is
            contiguous along N.
        scales: A :class:`Scales`, needed with ``TILING.block_scales``; other ones are for
            :func:`finish_tile`.
        waiting: Where sums of several leaves wait; see :func:`add_to_tree`.
    """
    LEAVES: tl.constexpr = TILING.leaves
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    IS_SMALL: tl.constexpr = BLOCK_M * BLOCK_N <= (1024 if LEAVES == 2 else 4096)
    K = matrices.K
    size = K // LEAVES
    if LEAVES == 1:
        total = _multiply_columns(matrices, row, column, rows, 0, K, TILING, w_first, scales)
    elif IS_SMALL and TILING.descriptors and waiting is None:
        # Loads take longer than the matrix unit, and in a loop for each leaf it would wait for the
        # first ones.
        total = _multiply_leaves_at_once(matrices, row, column, size, TILING)
    else:
        NODE: tl.constexpr = tl.dtype(TILING.node)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        ones = total.to(NODE)
        twos, fours = ones, ones
        # A branch within the loop over steps would make ptxas serialise the matrix unit. Of a
        # ``for``, Triton would keep the shared memory of its stores apart from that of others.
        leaf = 0
        while leaf < LEAVES:
            part = _multiply_columns(
                matrices, row, column, rows, leaf, size, TILING, w_first, scales
            )
            total, ones, twos, fours = add_to_tree(
                part, ones, twos, fours, leaf, LEAVES, NODE, waiting
            )
            leaf += 1
    return total


@triton.jit
def _multiply_leaves_at_once(matrices, row, column, size, TILING: tl.constexpr):
    """Return :func:`multiply_tile` of several leaves, ``size`` columns each, in one loop over K."""
    BLOCK_K: tl.constexpr = TILING.block_k
    LEAVES: tl.constexpr = TILING.leaves
    NODE: tl.constexpr = tl.dtype(TILING.node)
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total, ones = part, part.to(NODE)
    twos, fours = ones, ones
    steps = (size + BLOCK_K - 1) // BLOCK_K
    for step in range(LEAVES * steps):
        leaf, k = step // steps, step % steps * BLOCK_K
        left, right = _load_step(matrices, row, column, leaf, k, TILING, 0)
        part = add_product(part, left, right)
        if step % steps == steps - 1:
            total, ones, twos, fours = add_to_tree(part, ones, twos, fours, leaf, LEAVES, NODE)
            part = tl.zeros_like(part)
    return total


@triton.jit
def _load_step(matrices, row, column, leaf, k, TILING: tl.constexpr, w_first):
    """Return what a step multiplies, from element ``k`` of a leaf on, by descriptors: they return
    zeros beyond the matrix, or the leaf, so no masks are needed.
    """
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    BLOCK_K: tl.constexpr = TILING.block_k
    x, w = matrices.x, matrices.w
    if TILING.leaves == 1:
        left = x.load([row, k])
        right = w.load([column, k]).T if TILING.w_along_k else w.load([w_first + k, column])
    else:
        left = tl.reshape(x.load([leaf, row, k]), [BLOCK_M, BLOCK_K])
        if TILING.w_along_k:
            right = tl.reshape(w.load([leaf, column, k]), [BLOCK_N, BLOCK_K]).T
        else:
            right = tl.reshape(w.load([leaf, k, column]), [BLOCK_K, BLOCK_N])
    return left, right


@triton.jit
def _multiply_columns(
    matrices, row, column, rows, leaf, size, TILING: tl.constexpr, w_first, scales
):
    """Return what a leaf of K, of ``size`` columns, adds to :func:`multiply_tile`."""
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    BLOCK_K: tl.constexpr = TILING.block_k
    W_ALONG_K: tl.constexpr = TILING.w_along_k
    x, w, N, K = matrices.x, matrices.w, matrices.N, matrices.K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TILING.descriptors:
        for k in range(0, size, BLOCK_K):
            left, right = _load_step(matrices, row, column, leaf, k, TILING, w_first)
            total = add_step(total, left, right, scales, row, column, rows, N, K, k, TILING)
    else:
        first = il.multiple_of(leaf * size, TILING.factor)
        end = first + il.multiple_of(size, TILING.factor)
        if not W_ALONG_K:
            # Else rows of w need no mask that is the same for several: they are read along K. They
            # may be tokens then, of which there is any number.
            N = il.multiple_of(N, TILING.factor)
        x_stride = il.multiple_of(matrices.x_stride, TILING.factor)
        w_stride = il.multiple_of(matrices.w_stride, TILING.factor)
        m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        lines = x + m.to(tl.int64)[:, None] * x_stride
        columns = w + n.to(tl.int64)[None, :] * (w_stride if W_ALONG_K else 1)
        for k in range(first, end, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            inside_x = (m < rows)[:, None] & (inner < end)[None, :]
            left = tl.load(lines + inner[None, :], mask=inside_x, other=0.0)
            if W_ALONG_K:
                step = inner[:, None]
            else:
                step = inner.to(tl.int64)[:, None] * w_stride
            inside_w = (inner < end)[:, None] & (n < N)[None, :]
            right = tl.load(columns + step, mask=inside_w, other=0.0)
            total = add_step(total, left, right, scales, row, column, rows, N, K, k, TILING)
    return total


@triton.jit
def add_product(total, left, right):
    """Return ``total + left @ right``, by the matrix unit."""
    # TensorFloat-32 would lose what float32 callers ask for.
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def add_step(total, left, right, scales, row, column, rows, N, K, k, TILING: tl.constexpr):
    """Return ``total + left @ right``, of a step along K from element ``k`` on, times scales of
    blocks.
    """
    if TILING.block_scales == "":
        total = add_product(total, left, right)
    else:
        part = add_product(tl.zeros_like(total), left, right)
        total += part * _block_factors(scales, row, column, rows, N, K, k, TILING)
    return total


@triton.jit
def _block_factors(scales, row, column, rows, N, K, k, TILING: tl.constexpr):
    """Return the factors of what a step along K from element ``k`` on adds to a tile.

    A step is within a block of K, and tiles of up to 128 rows of the operand that has a scale for
    as many are within one block.
    """
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    x_scale, w_scale = scales.x_scale + k // SCALED, scales.w_scale + k // SCALED
    blocks = (K + SCALED - 1) // SCALED
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    if TILING.block_scales == "x":
        left = tl.load(x_scale + m * blocks, mask=m < rows, other=0.0)
        if BLOCK_N <= SCALED:
            factors = (left * tl.load(w_scale + column // SCALED * blocks))[:, None]
        else:
            right = tl.load(w_scale + n // SCALED * blocks, mask=n < N, other=0.0)
            factors = left[:, None] * right[None, :]
    else:
        right = tl.load(w_scale + n * blocks, mask=n < N, other=0.0)
        if BLOCK_M <= SCALED:
            factors = (right * tl.load(x_scale + row // SCALED * blocks))[None, :]
        else:
            left = tl.load(x_scale + m // SCALED * blocks, mask=m < rows, other=0.0)
            factors = left[:, None] * right[None, :]
    return factors


@triton.jit
def multiply_tile_of(which, matrices, row, column, rows, TILING: tl.constexpr, scales=None):
    """Return :func:`multiply_tile` by one of several weights, which lie one behind the other.

    With scales of blocks, so do those of the weights, whose rows are multiples of 128.
    """
    x, w, N, K = matrices.x, matrices.w, matrices.N, matrices.K
    if TILING.descriptors:
        # The weights form one tall matrix, so a tile at the end of one weight reaches into the
        # next. Its columns beyond N are masked at the store, and beyond K x is zero.
        first = which * N + column if TILING.w_along_k else column
        return multiply_tile(matrices, row, first, rows, TILING, which * K, scales)
    else:
        lines = N if TILING.w_along_k else K
        weight = w + which.to(tl.int64) * lines * matrices.w_stride
        chosen = Matrices(x, weight, N, K, matrices.x_stride, matrices.w_stride)
        if TILING.block_scales != "":
            of_weight = scales.w_scale + which * (N // SCALED) * ((K + SCALED - 1) // SCALED)
            scales = Scales(scales.x_scale, of_weight, None, None)
        return multiply_tile(chosen, row, column, rows, TILING, 0, scales)


@triton.jit
def scale_tile(total, scales, row, column, rows, N):
    """Return a product of float8 operands times their scales."""
    m, n = row + tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    left = tl.load(scales.x_scale + m * scales.x_stride, mask=m < rows, other=0.0)
    right = tl.load(scales.w_scale + n * scales.w_stride, mask=n < N, other=0.0)
    return total * left[:, None] * right[None, :]


@triton.jit
def add_bias(total, bias, column, N):
    """Return a tile plus the bias of its columns."""
    n = column + tl.arange(0, total.shape[1])
    return total + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def finish_tile(total, scales, bias, row, column, rows, N, TILING: tl.constexpr):
    """Return a product times its scales, if operands are float8 and these are not of blocks, plus
    the bias, if there is one.
    """
    if scales.x_scale is not None and TILING.block_scales == "":
        total = scale_tile(total, scales, row, column, rows, N)
    if bias is not None:
        total = add_bias(total, bias, column, N)
    return total


@triton.jit
def cells_of(first, row, column, rows, N, row_stride, TILING: tl.constexpr):
    """Return the offsets of a tile's cells, from row ``first`` of a matrix on, and their mask.

    Args:
        row, column: The tile's place among ``rows`` rows and ``N`` columns, outside of which cells
            are masked.
    """
    m, n = row + tl.arange(0, TILING.block_m), column + tl.arange(0, TILING.block_n)
    # A matrix may have more than 2^31 cells.
    cells = (first + m).to(tl.int64)[:, None] * row_stride + n[None, :]
    return cells, (m < rows)[:, None] & (n < il.multiple_of(N, TILING.factor))[None, :]


@triton.jit
def start_in_turn(spread_ns):
    """Let programs begin one after another, over ``spread_ns`` nanoseconds.

    Programs in step finish their tiles at the same time; the links are then crowded, and idle until
    the next tiles. Programs of the lowest index, which have most tiles if any have more, begin
    first.
    """
    lanes = tl.arange(0, 32)
    start = tl.max(il.clock_ns(lanes), 0)
    delay = spread_ns.to(tl.int64) * tl.program_id(0) // tl.num_programs(0)
    while tl.max(il.clock_ns(lanes), 0) - start < delay:
        pass
