"""``gemm_reduce_scatter`` as two steps of torch: the unfused pair that the fused kernel is checked
against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.gemm.reference import product, sum_rows


def gemm_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    splits: Sequence[int],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """``reduce_scatter(x @ w.T) + bias``, every intermediate in ``out_dtype``."""
    y = sum_rows(product(x, w, None, x_scale, w_scale, out_dtype), splits, group)
    return y if bias is None else y + bias
