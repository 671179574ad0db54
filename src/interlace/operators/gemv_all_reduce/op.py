"""``torch.ops.interlace.gemv_all_reduce``: schema, shape inference, gradient. Triton is imported by
the first call.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.comm.groups.registration import OPERATOR_TAGS, register
from interlace.gemm.gradients import product_gradients, save_operands
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
    save_operands(ctx, x, w, bias)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Compute the gradients without communication.

    The output is the same on every rank, and so is its gradient.
    """
    rows = grad if grad.dim() == 2 else grad[None]
    grad_x, grad_w, grad_bias = product_gradients(ctx, rows, is_replicated=True)
    if grad_x is not None:
        grad_x = grad_x.reshape([*grad.shape[:-1], grad_x.shape[1]])
    return grad_x, grad_w, grad_bias, None, None, None


register(_library, "gemv_all_reduce", run, _fake, backward=_backward, setup_context=_setup_context)
