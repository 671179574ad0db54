"""``torch.ops.interlace.gemv_all_reduce``: schema, shape inference, gradient. Triton is imported by
the first call.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.comm.registration import OPERATOR_TAGS, register
from interlace.gemm.replicated import replicated
from interlace.operators.gemv_all_reduce.launch import run

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "gemv_all_reduce(Tensor x, Tensor w, Tensor? bias, str group_name, str impl, str config) -> "
    "Tensor",
    tags=OPERATOR_TAGS,
)


def _fake(x: torch.Tensor, w: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty([*x.shape[:-1], w.shape[0]])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, bias, ctx.group_name, *_ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None
    )


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Compute the gradients without communication.

    The output is the same on every rank, and so is its gradient.
    """
    x, w = ctx.saved_tensors
    grad_bias = (
        grad.reshape(-1, grad.shape[-1]).sum(0)
        if ctx.has_bias and ctx.needs_input_grad[2]
        else None
    )
    # Ranks have different operands, so a second derivative is a sum over the ranks.
    if torch.is_grad_enabled():
        grad = replicated(grad, ctx.group_name)
    rows = grad.reshape(-1, grad.shape[-1])
    grad_x = (rows @ w).reshape([*grad.shape[:-1], w.shape[1]]) if w is not None else None
    grad_w = rows.mT @ x.reshape(-1, x.shape[-1]) if x is not None else None
    return grad_x, grad_w, grad_bias, None, None, None


register(_library, "gemv_all_reduce", run, _fake, backward=_backward, setup_context=_setup_context)
