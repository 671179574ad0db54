"""``gemm_all_reduce`` as two steps of torch: the unfused pair that the fused kernel is checked
against.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from interlace.gemm.reference import is_alone, product


def gemm_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """``all_reduce(x @ w.T) + bias``, every intermediate in ``out_dtype``."""
    y = product(x, w, None, x_scale, w_scale, out_dtype)
    if not is_alone(group):
        dist.all_reduce(y, group=group)
    return y if bias is None else y + bias
