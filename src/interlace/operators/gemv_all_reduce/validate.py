"""Rules for the arguments of ``gemv_all_reduce``, checked on every rank before anything is sent."""

from __future__ import annotations

import torch

from interlace.errors import ArgumentError
from interlace.gemm.operands import (
    require_common_dimension,
    require_common_dtype,
    require_device,
    require_float,
    require_tensor,
)
from interlace.operators.gemv_all_reduce.config import OPERATOR


def validate(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuse arguments that no rank could compute with; see ``api`` for the rules."""
    require_tensor(f"{OPERATOR}: x", x)
    require_tensor(f"{OPERATOR}: w", w)
    if x.dim() not in (1, 2):
        raise ArgumentError(f"{OPERATOR}: x must be [K] or [B, K]; got shape {list(x.shape)}.")
    if w.dim() != 2:
        raise ArgumentError(f"{OPERATOR}: w must be [N, K]; got shape {list(w.shape)}.")
    require_common_dimension(OPERATOR, x, w)
    require_float(f"{OPERATOR}: x", x.dtype)
    require_common_dtype(OPERATOR, x, w)
    require_device(f"{OPERATOR}: w", w, "x", x.device)
    if w.shape[1] > 1 and w.shape[0] > 0 and w.stride(1) != 1:
        raise ArgumentError(
            f"{OPERATOR}: rows of w must be contiguous; got strides {list(w.stride())}. "
            f"Keep w as nn.Linear does, [N, K], or call .contiguous() once."
        )
    if bias is not None:
        require_tensor(f"{OPERATOR}: bias", bias)
        if list(bias.shape) != [w.shape[0]]:
            raise ArgumentError(
                f"{OPERATOR}: bias must be [N] with N = {w.shape[0]}; got shape {list(bias.shape)}."
            )
        if bias.dtype != x.dtype or bias.device != x.device:
            raise ArgumentError(
                f"{OPERATOR}: bias must be {x.dtype} on {x.device}, like x; got {bias.dtype} on "
                f"{bias.device}."
            )
