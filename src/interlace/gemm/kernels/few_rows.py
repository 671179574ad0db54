"""The kernel of products of few rows: one input with up to three weights, each read once."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels import gemv
from interlace.gemm.kernels.tiles import Matrices, Scales, multiply_tile, scale_tile


@triton.jit(do_not_specialize=["M", "first_1", "first_2"])
def multiply_few_rows(
    x, w_0, w_1, w_2, bias_0, bias_1, bias_2, y_0, y_1, y_2, M, N_0, N_1, N_2, K, first_1, first_2,
    x_stride, stride_0, stride_1, stride_2, scales, FIRST: tl.constexpr, TILING: tl.constexpr,
):
    """Compute ``y_i = x @ w_i.T, + bias_i`` for one weight or three, one tile per program.

    Each element is summed along K by one program, in the order of K, so where the matrix unit adds
    up in one way no tile changes its bits. The programs of weight i begin at ``first_i``; with two
    weights, no program is left for the third one, and with one, the others are None.

    ``FIRST`` is the matrix unit's first operand, whose tiles have 64 rows at least: ``"w"``, so
    that rows of x that do not exist need not be multiplied, or ``"x"``. With ``"row"`` x is one
    row, which is multiplied without the matrix unit.

    ``scales`` is a :class:`Scales`, for float8 operands with one weight.

    **Example.** Weights of 256 and 128 rows, tiles of 64 rows of the weight and all rows of x:
    programs 0 to 3 have weight 0, and 4 and 5 weight 1; ``first_1`` is 4.
    """
    tile, w, bias, y, N, w_stride = tl.program_id(0), w_0, bias_0, y_0, N_0, stride_0
    FACTOR: tl.constexpr = TILING.factor
    if w_1 is not None:
        in_1, in_2 = tile >= first_1, tile >= first_2
        # One loop multiplies by whichever weight it is, as each loop has shared memory of its own.
        # A pointer is selected and not branched to: the compiler then knows its alignment.
        if FIRST != "row" and TILING.descriptors:
            if in_2:
                w = w_2
            elif in_1:
                w = w_1
        else:
            w = tl.where(in_2, w_2, tl.where(in_1, w_1, w_0))
        if bias_0 is not None:
            bias = tl.where(in_2, bias_2, tl.where(in_1, bias_1, bias_0))
        y = tl.where(in_2, y_2, tl.where(in_1, y_1, y_0))
        N = tl.where(in_2, N_2, tl.where(in_1, N_1, N_0))
        w_stride = tl.where(in_2, stride_2, tl.where(in_1, stride_1, stride_0))
        tile -= tl.where(in_2, first_2, tl.where(in_1, first_1, 0))
    K, x_stride = il.multiple_of(K, FACTOR), il.multiple_of(x_stride, FACTOR)
    N, w_stride = il.multiple_of(N, FACTOR), il.multiple_of(w_stride, FACTOR)
    ROWS: tl.constexpr = 1 if FIRST == "row" else TILING.block_n if FIRST == "w" else TILING.block_m
    COLUMNS: tl.constexpr = TILING.block_m if FIRST == "w" else TILING.block_n
    # Tiles of the same columns follow one another, so that weights stay in the L2.
    row_tiles = 1 if FIRST == "row" else (M + ROWS - 1) // ROWS
    row, column = tile % row_tiles * ROWS, tile // row_tiles * COLUMNS
    m, n = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    if FIRST == "x":
        matrices = Matrices(x, w, N, K, x_stride, w_stride)
        total = multiply_tile(matrices, row, column, M, TILING, scales=scales)
        if scales.x_scale is not None and TILING.block_scales == "":
            total = scale_tile(total, scales, row, column, M, N)
        cells = m.to(tl.int64)[:, None] * N + n[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
    else:
        swapped = Scales(scales.w_scale, scales.x_scale, scales.w_stride, scales.x_stride)
        if FIRST == "w":
            matrices = Matrices(w, x, M, K, w_stride, x_stride)
            total = multiply_tile(matrices, column, row, N, TILING, scales=swapped)
            IN_BLOCKS: tl.constexpr = TILING.block_scales != ""
        else:
            # One row that the compiler knows of, so that it computes no places of tokens.
            matrices = gemv.GemvMatrices(x, w, N, 1, K, x_stride, w_stride)
            operands = gemv.point_to_operands(tile, matrices, TILING)
            total = gemv.multiply_tile(operands, K, TILING, scales, column)
            IN_BLOCKS: tl.constexpr = TILING.block_scales
        if scales.x_scale is not None and not IN_BLOCKS:
            total = scale_tile(total, swapped, column, row, N, M)
        cells = m.to(tl.int64)[None, :] * N + n[:, None]
        inside = (m < M)[None, :] & (n < N)[:, None]
    if bias is not None:
        values = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        total += values[None, :] if FIRST == "x" else values[:, None]
    tl.store(y + cells, total.to(y.dtype.element_ty), mask=inside)
