"""``gemm_all_reduce`` as two steps of torch, and with a norm behind them: the unfused calls that
the kernels are checked against.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.gemm.epilogue import Epilogue
from interlace.gemm.operands import Operands
from interlace.gemm.reference import is_alone, product

_LARGEST_FLOAT8, _BLOCK = 448.0, 128


def gemm_all_reduce(operands: Operands, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return ``all_reduce(x @ w.T) + bias``, every intermediate in ``out_dtype``."""
    y = product(dataclasses.replace(operands, bias=None))
    if not is_alone(group):
        dist.all_reduce(y, group=group)
    return y if operands.bias is None else y + operands.bias


def gemm_all_reduce_norm(
    operands: Operands, epilogue: Epilogue, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute y, the new residual and y's scales; the sum over ranks has ``out_dtype``."""
    total = product(dataclasses.replace(operands, bias=None))
    if not is_alone(group):
        dist.all_reduce(total, group=group)
    # Added in float32 and rounded once, as the kernels do.
    added = [term.float() for term in (operands.bias, epilogue.residual) if term is not None]
    h = sum(added, start=total.float()).to(operands.out_dtype)
    value, vectors = h.float(), (epilogue.norm_weight, epilogue.norm_bias)
    weight, offset = (None if vector is None else vector.float() for vector in vectors)
    if epilogue.norm == "layer":
        y = F.layer_norm(value, value.shape[-1:], weight, offset, epilogue.eps)
    else:
        y = F.rms_norm(value, value.shape[-1:], weight, epilogue.eps)
        y = y if offset is None else y + offset
    scales = value.new_empty([0])
    if epilogue.quantization == "none":
        return y.to(epilogue.out_dtype), h, scales
    divisor = epilogue.scale
    if divisor is None:
        columns = y.shape[-1]
        width = _BLOCK if epilogue.quantization == "block" else max(columns, 1)
        blocks = F.pad(y, (0, -columns % width)).unflatten(-1, (-1, width))
        scales = blocks.abs().amax(-1) / _LARGEST_FLOAT8
        scales = torch.where(scales == 0, 1.0, scales)
        divisor = scales.repeat_interleave(width, -1)[:, :columns]
    y = y / divisor
    return y.clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(epilogue.out_dtype), h, scales
