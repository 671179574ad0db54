"""Rules for the arguments of ``mixture_of_experts``; every rank checks them before it sends."""

from __future__ import annotations

import torch

from interlace.errors import ArgumentError
from interlace.gemm.operands import FLOATS, require_device, require_float, require_tensor
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.operators.mixture_of_experts.layout import MAX_EXPERTS, MAX_TOKENS, MAX_TOP_K


def validate(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None,
    b_out: torch.Tensor | None,
    activation: ExpertActivation,
    capacity: int | None,
    world_size: int,
) -> None:
    """Refuse arguments that no rank could compute with; see ``api`` for the rules."""
    for name, tensor in (
        ("x", x), ("experts", experts), ("weights", weights), ("w_in", w_in), ("w_out", w_out),
        ("b_in", b_in), ("b_out", b_out),
    ):  # fmt: skip
        if tensor is not None or name not in ("b_in", "b_out"):
            require_tensor(f"{OPERATOR}: {name}", tensor)
    if x.dim() != 2:
        raise ArgumentError(f"{OPERATOR}: x must be [T, hidden]; got shape {list(x.shape)}.")
    tokens = x.shape[0]
    require_float(f"{OPERATOR}: x", x.dtype)
    if tokens > MAX_TOKENS:
        raise ArgumentError(
            f"{OPERATOR}: a rank must have at most {MAX_TOKENS} tokens; got {tokens}. Call in "
            "parts."
        )
    _validate_weights(w_in, w_out, b_in, b_out, x)
    if w_in.shape[2] == 1 and activation.needs_gate:
        raise ArgumentError(
            f"{OPERATOR}: activation must have no limit and no up_offset where experts have no "
            f"gate; got {activation}."
        )
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
    # Slots may be empty, so a token may have more of them than there are experts.
    if not 1 <= top_k <= MAX_TOP_K:
        raise ArgumentError(
            f"{OPERATOR}: experts must have 1 to {MAX_TOP_K} slots for a token; got {top_k}."
        )
    if weights.shape != experts.shape or weights.dtype not in FLOATS:
        raise ArgumentError(
            f"{OPERATOR}: weights must be {list(experts.shape)}, like experts, of a floating "
            "dtype; "
            f"got {weights.dtype} {list(weights.shape)}."
        )
    for name, tensor in (("experts", experts), ("weights", weights)):
        require_device(f"{OPERATOR}: {name}", tensor, "x", x.device)
    if isinstance(capacity, (float, str, bool)):
        raise ArgumentError(
            f"{OPERATOR}: capacity must be an integer, or None for no limit; got {capacity!r}."
        )
    if capacity is not None and capacity < 1:
        raise ArgumentError(
            f"{OPERATOR}: capacity must be positive, or None for no limit; got {capacity}."
        )


def _validate_weights(
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None,
    b_out: torch.Tensor | None,
    x: torch.Tensor,
) -> None:
    hidden = x.shape[1]
    if w_in.dim() != 4 or w_in.shape[2] not in (1, 2) or w_in.shape[3] != hidden:
        raise ArgumentError(
            f"{OPERATOR}: w_in must be [L, F, 2, hidden], gate and up of this rank's L experts, "
            f"with hidden = {hidden}, or [L, F, 1, hidden] without a gate; "
            f"got shape {list(w_in.shape)}. torch.stack([w_gate, w_up], dim=2) makes it of two "
            "[L, F, hidden]."
        )
    local, ffn, gates = w_in.shape[:3]
    if min(local, ffn, hidden) < 1:
        raise ArgumentError(
            f"{OPERATOR}: experts, F and hidden must be positive; got {local}, {ffn} and {hidden}."
        )
    for name, tensor, dimensions, shape in (
        ("w_out", w_out, "[L, hidden, F]", [local, hidden, ffn]),
        ("b_in", b_in, "[L, F, 2]" if gates == 2 else "[L, F, 1]", [local, ffn, gates]),
        ("b_out", b_out, "[L, hidden]", [local, hidden]),
    ):
        if tensor is not None and list(tensor.shape) != shape:
            raise ArgumentError(
                f"{OPERATOR}: {name} must be {dimensions} = {shape}; got shape "
                f"{list(tensor.shape)}."
            )
    for name, tensor in (("w_in", w_in), ("w_out", w_out), ("b_in", b_in), ("b_out", b_out)):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise ArgumentError(
                f"{OPERATOR}: {name} must be {x.dtype} on {x.device}, like x; got {tensor.dtype} "
                f"on {tensor.device}."
            )
