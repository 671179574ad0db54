"""Kernels around what the kernels of experts share."""

import triton
import triton.language as tl

from interlace.gemm.kernels.tiles import Scales
from interlace.operators.mixture_of_experts.kernels.tiles import multiply_gate_and_up


@triton.jit
def gate_and_up(
    x,
    w,
    x_scale,
    w_scale,
    gates,
    ups,
    row,
    end,
    expert,
    column,
    width,
    inner,
    TILING: tl.constexpr,
):
    """Store a tile of both halves of an expert's product, ``[block_m, block_n // 2]`` each."""
    scales = Scales(x_scale, w_scale, None, None)
    gate, up = multiply_gate_and_up(x, w, row, end, expert, column, width, inner, TILING, scales)
    COLUMNS: tl.constexpr = TILING.block_n // 2
    cells = tl.arange(0, TILING.block_m)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(gates + cells, gate)
    tl.store(ups + cells, up)
