"""Products of rows by a weight: by the library, or by a kernel of ours where that is faster or the
library has none.
"""

from __future__ import annotations

import torch

from interlace.comm.replay.tapes import spoil, step
from interlace.gemm import few_rows, scaled
from interlace.gemm.operands import RowPart, Weight
from interlace.units import round_down

_MOST_SCALED_ROWS = {"block": 64, "row": 32, "matrix": 0}
"""Float8 rows up to which our kernel is faster than cuBLAS, by what each scale is of. With scales
of blocks it takes 0.54 to 0.84 of the time with 1 to 64 rows, in four products on an H200 (decision
0031). It has not been timed with a scale for each row: cuBLAS takes 12 us for 1 to 16 rows of
8192 x 3584, and our kernel 8.4 to 8.9 with scales of blocks.
"""


def multiply_into(
    out: torch.Tensor, rows: RowPart, weight: Weight, bias: torch.Tensor | None = None
) -> None:
    """Compute ``x @ w.T + bias`` into ``out``, by cuBLAS on a GPU where it takes such a product.

    Args:
        out: ``[m, N]``, with contiguous rows.
        rows: ``[m, K]``.
        weight: ``[N, K]``; of float8 contiguous along K.
        bias: ``[N]`` of out's dtype, or None for none.
    """
    if rows.scale is not None:
        spoil("which kernels multiply float8 is no step")
        _multiply_scaled_into(out, rows, weight, bias)
    elif bias is None:
        step(torch.mm, rows.x, weight.transposed, out=out)
    else:
        step(torch.addmm, bias, rows.x, weight.transposed, out=out)


def multiply_by_faster(
    out: torch.Tensor, rows: RowPart, weight: Weight, bias: torch.Tensor | None
) -> None:
    """Compute the same into contiguous memory, by whichever kernel is faster."""
    if rows.scale is None and few_rows.is_faster(rows.x, weight.w):
        few_rows.multiply(rows.x, [weight.w], [bias], [out])
    else:
        multiply_into(out, rows, weight, bias)


def _multiply_scaled_into(
    out: torch.Tensor, rows: RowPart, weight: Weight, bias: torch.Tensor | None
) -> None:
    """Compute a product of float8 operands: of few rows by our kernel, of more by cuBLAS, and what
    cuBLAS does not take by our kernel again.
    """
    (x, x_scale), w, w_scale = rows, weight.w, weight.scale
    assert x_scale is not None
    assert w_scale is not None
    if not out.numel():
        return
    if not x.is_cuda:
        # The interpreter takes long for what libraries need no time for.
        wide_x, wide_w = (
            scaled.dequantised(x, x_scale, 1),
            scaled.dequantised(w, w_scale, scaled.SCALE_BLOCK),
        )
        y = wide_x @ wide_w.T
        out.copy_(y if bias is None else y + bias)
        return
    kind = scaled.kind_of(x_scale, w_scale)
    if len(x) > _MOST_SCALED_ROWS[kind]:
        count = len(x)
        if kind == "block":
            # cuBLAS takes a multiple of these rows. It moves less to pad them than to read the
            # weight again for the last ones, by our kernel, unless there are many.
            m, (n, k) = count, w.shape
            padding_bytes = 2 * m * k + 2 * m * n * out.itemsize
            if padding_bytes > n * k:
                count = round_down(count, scaled.ROWS_OF_BLOCKS)
        part_scale = x_scale if x_scale.numel() == 1 else x_scale[:count]
        if scaled.multiply_into(out[:count], x[:count], w, part_scale, w_scale, bias):
            if count == len(x):
                return
            out, x, x_scale = out[count:], x[count:], x_scale[count:]
    y = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    few_rows.multiply(x, [w], [bias], [y], scales=(x_scale, w_scale))
    if y is not out:
        out.copy_(y)
