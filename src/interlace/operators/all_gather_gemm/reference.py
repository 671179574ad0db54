"""``all_gather_gemm`` as two steps of torch: the unfused pair that the fused kernel is checked
against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.gemm.operands import Operands
from interlace.gemm.reference import gather_rows, product


def all_gather_gemm(
    operands: Operands, splits: Sequence[int], group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``all_gather(x) @ w.T + bias`` and the gathered x.

    Each rank's scales go with its rows.
    """
    gathered, scale = gather_rows(operands.x, splits, group), operands.x_scale
    if scale is not None:
        if not operands.has_block_scales:
            scale = scale.reshape(-1, 1).expand(len(operands.x), 1)
        scale = gather_rows(scale, splits, group)
    return product(dataclasses.replace(operands, x=gathered, x_scale=scale)), gathered
