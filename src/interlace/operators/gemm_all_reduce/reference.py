"""``gemm_all_reduce`` as two steps of torch: the unfused pair that the fused kernel is checked
against.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from interlace.gemm.reference import Factors, is_alone, product


def gemm_all_reduce(factors: Factors, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return ``all_reduce(x @ w.T) + bias``, every intermediate in ``out_dtype``."""
    y = product(factors._replace(bias=None))
    if not is_alone(group):
        dist.all_reduce(y, group=group)
    return y if factors.bias is None else y + factors.bias
