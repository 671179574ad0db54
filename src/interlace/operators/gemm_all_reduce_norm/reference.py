"""``gemm_all_reduce_norm`` as steps of torch, which the kernels are checked against."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

_LARGEST_FLOAT8 = 448.0


def gemm_all_reduce_norm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    norm: str,
    eps: float,
    scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute y, the new residual and y's scales; the sum over ranks is rounded to x's dtype."""
    total = F.linear(x, w)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    # Added in float32 and rounded once, as the kernels do.
    added = [each.float() for each in (bias, residual) if each is not None]
    h = sum(added, start=total.float()).to(x.dtype)
    value = h.float()
    weight = None if norm_weight is None else norm_weight.float()
    offset = None if norm_bias is None else norm_bias.float()
    if norm == "layer":
        y = F.layer_norm(value, value.shape[-1:], weight, offset, eps)
    else:
        y = F.rms_norm(value, value.shape[-1:], weight, eps)
        y = y if offset is None else y + offset
    scales = value.new_empty([0])
    if out_dtype != torch.float8_e4m3fn:
        return y.to(out_dtype), h, scales
    if scale is None:
        largest = y.abs().amax(-1, keepdim=True)
        scales = torch.where(largest == 0, 1.0, largest / _LARGEST_FLOAT8)
    y = y / (scales if scale is None else scale)
    return y.clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(out_dtype), h, scales
