"""``gemv_all_reduce`` as two steps of torch, which the fused kernel is checked against."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.gemm.reference import is_alone


def gemv_all_reduce(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Compute ``all_reduce(x @ w.T) + bias``, every intermediate in the tensors' dtype."""
    y = F.linear(x, w)
    if not is_alone(group):
        dist.all_reduce(y, group=group)
    return y if bias is None else y + bias
