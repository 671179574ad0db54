"""``gemm_all_to_all`` as two steps of torch: the unfused pair that the fused kernel is checked
against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.gemm.operands import Operands
from interlace.gemm.reference import exchange_rows, product


def gemm_all_to_all(
    operands: Operands,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return ``all_to_all_single(x @ w.T + bias)``."""
    return exchange_rows(product(operands), input_splits, output_splits, group)


def send_back(
    grad: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Send every row back to the rank that it came from: the transpose of the all-to-all."""
    return exchange_rows(grad, output_splits, input_splits, group)
