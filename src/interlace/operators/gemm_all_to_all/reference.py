"""``gemm_all_to_all`` as two steps of torch: the unfused pair that the fused kernel is checked
against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.gemm.reference import exchange_rows, is_alone, product


def gemm_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return ``all_to_all_single(x @ w.T + bias)``."""
    return exchange_rows(
        product(x, w, bias, x_scale, w_scale, out_dtype), input_splits, output_splits, group
    )


def send_back(
    grad: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Transpose the all-to-all: send every row to the rank that it came from."""
    if input_splits is None or output_splits is None:
        ranks = 1 if is_alone(group) else dist.get_world_size(group)
        input_splits = output_splits = [len(grad) // ranks] * ranks
    return exchange_rows(grad, output_splits, input_splits, group)
