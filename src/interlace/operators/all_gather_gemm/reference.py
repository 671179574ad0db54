"""``all_gather_gemm`` as two steps of torch: the unfused pair that the fused kernel is checked
against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.gemm.reference import gather_rows, product


def all_gather_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    splits: Sequence[int],
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``all_gather(x) @ w.T + bias``, and the gathered x. Each rank's scales go with its rows."""
    gathered = gather_rows(x, splits, group)
    if x_scale is not None:
        x_scale = gather_rows(x_scale.reshape(-1, 1).expand(len(x), 1), splits, group)
    return product(gathered, w, bias, x_scale, w_scale, out_dtype), gathered
