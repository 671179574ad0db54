"""``gemm_reduce_scatter`` as two steps of torch: the unfused pair that the fused kernel is checked
against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.gemm.reference import Factors, product, sum_rows


def gemm_reduce_scatter(
    factors: Factors, splits: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return ``reduce_scatter(x @ w.T) + bias``, every intermediate in ``out_dtype``."""
    y = sum_rows(product(factors._replace(bias=None)), splits, group)
    return y if factors.bias is None else y + factors.bias
