"""``gemm_reduce_scatter`` as two steps of torch: the unfused pair that the fused kernel is checked
against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.gemm.operands import Operands
from interlace.gemm.reference import product, sum_rows


def gemm_reduce_scatter(
    operands: Operands, splits: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return ``reduce_scatter(x @ w.T) + bias``, every intermediate in ``out_dtype``."""
    y = sum_rows(product(dataclasses.replace(operands, bias=None)), splits, group)
    return y if operands.bias is None else y + operands.bias
