"""The kernel of ``linears``: the products of a few tokens with up to three weights."""

import triton
import triton.language as tl

from interlace.gemm.kernels.gemv import (
    Matrices, Result, multiply_tile, point_to_operands, store_output, tile_at,
)


@triton.jit(do_not_specialize=["first_1", "first_2"])
def linears(
    x, w_0, w_1, w_2, bias_0, bias_1, bias_2, y_0, y_1, y_2,
    N_0, N_1, N_2, B, K, first_1, first_2, stride_x, stride_0, stride_1, stride_2,
    TILING: tl.constexpr,
):
    """Compute ``y_i = x @ w_i.T, + bias_i`` for three weights, a tile of one of them per program.

    Nothing is communicated. The programs of weight i begin at ``first_i``, those of the first
    weight at 0. With two weights, no program is left for the third one.

    **Example.** Weights of 8, 4 and 4 rows, four rows per tile: ``first_1 = 2``, ``first_2 = 3``;
    programs 0 and 1 have the tiles of weight 0, program 2 has weight 1 and program 3 weight 2.
    """
    program = tl.program_id(0)
    in_1, in_2 = program >= first_1, program >= first_2
    # Selected and not branched to: the compiler knows the alignment of a selected pointer.
    w = tl.where(in_2, w_2, tl.where(in_1, w_1, w_0))
    y = tl.where(in_2, y_2, tl.where(in_1, y_1, y_0))
    bias = None
    if bias_0 is not None:
        bias = tl.where(in_2, bias_2, tl.where(in_1, bias_1, bias_0))
    N = tl.where(in_2, N_2, tl.where(in_1, N_1, N_0))
    stride_w = tl.where(in_2, stride_2, tl.where(in_1, stride_1, stride_0))
    tile = program - tl.where(in_2, first_2, tl.where(in_1, first_1, 0))
    matrices = Matrices(x, w, N, B, K, stride_x, stride_w)
    operands = point_to_operands(tile, matrices, TILING)
    total = multiply_tile(operands, K, TILING)
    rows, tokens, mask = tile_at(tile, N, B, TILING)
    store_output(Result(y, bias, N, B), total, rows, tokens, mask, True)
