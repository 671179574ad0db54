"""Rules for the arguments of ``mixture_of_experts``; every rank checks them before it sends."""

from __future__ import annotations

import torch

from interlace.errors import ArgumentError
from interlace.gemm.operands import FLOATS, require_device, require_float
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.operators.mixture_of_experts.layout import MAX_EXPERTS, MAX_TOKENS, MAX_TOP_K


def validate(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    capacity: int | None,
    world_size: int,
) -> None:
    """Refuse arguments that no rank could compute with; see ``api`` for the rules."""
    if x.dim() != 2:
        raise ArgumentError(f"{OPERATOR}: x must be [T, hidden]; got shape {list(x.shape)}.")
    tokens, hidden = x.shape
    require_float(f"{OPERATOR}: x", x.dtype)
    if tokens > MAX_TOKENS:
        raise ArgumentError(
            f"{OPERATOR}: a rank must have at most {MAX_TOKENS} tokens; got {tokens}. Call in "
            "parts."
        )
    _validate_weights(w_in, w_out, hidden, x)
    total = world_size * w_in.shape[0]
    if total > MAX_EXPERTS:
        raise ArgumentError(
            f"{OPERATOR}: all ranks together must have at most {MAX_EXPERTS} experts; got {total}."
        )
    if experts.dim() != 2 or experts.shape[0] != tokens:
        raise ArgumentError(
            f"{OPERATOR}: experts must be [T, k] with T = {tokens}; got shape "
            f"{list(experts.shape)}."
        )
    if experts.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"{OPERATOR}: experts must be int32 or int64; got {experts.dtype}.")
    top_k = experts.shape[1]
    if not 1 <= top_k <= min(MAX_TOP_K, total):
        raise ArgumentError(
            f"{OPERATOR}: a token must go to 1 to {min(MAX_TOP_K, total)} of {total} experts; got "
            f"{top_k}."
        )
    if weights.shape != experts.shape or weights.dtype not in FLOATS:
        raise ArgumentError(
            f"{OPERATOR}: weights must be {list(experts.shape)}, like experts, of a floating "
            "dtype; "
            f"got {weights.dtype} {list(weights.shape)}."
        )
    for name, tensor in (("experts", experts), ("weights", weights)):
        require_device(f"{OPERATOR}: {name}", tensor, "x", x.device)
    if capacity is not None and capacity < 1:
        raise ArgumentError(
            f"{OPERATOR}: capacity must be positive, or None for no limit; got {capacity}."
        )


def _validate_weights(
    w_in: torch.Tensor, w_out: torch.Tensor, hidden: int, x: torch.Tensor
) -> None:
    if w_in.dim() != 4 or w_in.shape[2] != 2 or w_in.shape[3] != hidden:
        raise ArgumentError(
            f"{OPERATOR}: w_in must be [L, F, 2, hidden], gate and up of this rank's L experts, "
            f"with hidden = {hidden}; "
            f"got shape {list(w_in.shape)}. torch.stack([w_gate, w_up], dim=2) makes it of two "
            "[L, F, hidden]."
        )
    local, ffn = w_in.shape[:2]
    if min(local, ffn, hidden) < 1:
        raise ArgumentError(
            f"{OPERATOR}: experts, F and hidden must be positive; got {local}, {ffn} and {hidden}."
        )
    if list(w_out.shape) != [local, hidden, ffn]:
        raise ArgumentError(
            f"{OPERATOR}: w_out must be [L, hidden, F] = {[local, hidden, ffn]}; got shape "
            f"{list(w_out.shape)}."
        )
    for name, weight in (("w_in", w_in), ("w_out", w_out)):
        if weight.dtype != x.dtype or weight.device != x.device:
            raise ArgumentError(
                f"{OPERATOR}: {name} must be {x.dtype} on {x.device}, like x; got {weight.dtype} "
                f"on {weight.device}."
            )
