"""``torch.ops.interlace.gemm_all_reduce``: schema, shape inference, gradient. Triton is imported by
the first call.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.comm.registration import OPERATOR_TAGS, register
from interlace.gemm.replicated import replicated

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "gemm_all_reduce(Tensor x, Tensor w, Tensor? bias, Tensor? x_scale, Tensor? w_scale, "
    "ScalarType out_dtype, "
    "str group_name, str impl, str config) -> Tensor",
    tags=OPERATOR_TAGS,
)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    group_name: str,
    impl: str,
    config: str,
) -> torch.Tensor:
    from interlace.gemm.operands import Operands
    from interlace.operators.gemm_all_reduce.launch import run

    return run(Operands(x, w, bias, x_scale, w_scale, out_dtype), group_name, impl, config)


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    *_: object,
) -> torch.Tensor:
    return x.new_empty([x.shape[0], w.shape[0]], dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, bias, *_, ctx.group_name, _, _ = inputs
    ctx.dtype, ctx.has_bias = x.dtype, bias is not None
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None
    )


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The output is the same on every rank, and so is its gradient: nothing needs to be
    communicated.
    """
    x, w = ctx.saved_tensors
    grad_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    rows = grad.to(ctx.dtype)
    # Each rank's operands are others, so a second derivative is a sum over the ranks
    if torch.is_grad_enabled():
        rows = replicated(rows, ctx.group_name)
    grad_x = rows @ w if w is not None else None
    grad_w = rows.mT @ x if x is not None else None
    return grad_x, grad_w, grad_bias, *[None] * 6


register(_library, "gemm_all_reduce", _run, _fake, backward=_backward, setup_context=_setup_context)
