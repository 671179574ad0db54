"""Gradients of a product whose rows each rank has, and of tensors that are the same on every rank.

The gradient of a tensor that is the same on every rank, and used on each rank for something else,
is the sum of what each rank's use of it contributes. An operator whose result is the same on every
rank (an all-reduce) has a gradient that is, too; its formula uses that gradient on each rank for
another part of the operands, so a second derivative needs the sum.
Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), f and g.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from interlace.gemm.reference import is_alone


def save_operands(ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Save what :func:`product_gradients` needs, in a ``setup_context`` whose first inputs are x, w
    and bias: each of x and w only if the other one's gradient is needed.
    """
    ctx.dtype, ctx.has_bias = x.dtype, bias is not None
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None
    )


def product_gradients(
    ctx: Any, grad: torch.Tensor, *, is_replicated: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, w and bias in ``x @ w.T + bias``; those not needed are None.

    Args:
        ctx: The context in which :func:`save_operands` has saved x and w. Leading dimensions of x
            count as rows.
        grad: The product's gradient, ``[M, N]``.
        is_replicated: Whether ``grad`` is the same on every rank of the group ``ctx.group_name``.
    """
    x, w = ctx.saved_tensors
    grad_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    rows = grad.to(ctx.dtype)
    if is_replicated and torch.is_grad_enabled():
        # Each rank has operands of its own, so a second derivative is a sum over the ranks.
        rows = replicated(rows, ctx.group_name)
    grad_x = rows @ w if w is not None else None
    grad_w = rows.mT @ x.reshape(len(rows), x.shape[-1]) if x is not None else None
    return grad_x, grad_w, grad_bias


def replicated(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """``x`` itself, which every rank of the group has; its gradient is summed over the ranks.

    The backward pass is collective. The sum can be differentiated again.
    """
    (y,) = all_replicated((x,), group_name)
    return y


def all_replicated(tensors: tuple[torch.Tensor, ...], group_name: str) -> tuple[torch.Tensor, ...]:
    """Several tensors as by :func:`replicated`, whose gradients are summed in one collective if
    they have the same dtype.
    """
    same: tuple[torch.Tensor, ...] = _Replicated.apply(  # type: ignore[no-untyped-call]
        group_name, *tensors
    )
    return same


def unviewed(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of ``x`` that is no view to autograd, which refuses to modify
    a view in place that a function of its own returns: ``nn.ReLU(inplace=True)``, say.
    """
    same: torch.Tensor = torch.ops.aten._unsafe_view(x, x.shape)
    return same


def summed(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum of the ranks' ``x``, which every rank gets and uses alike, so that its gradient is
    that of each ``x``. Collective.
    """
    # A function of autograd costs the host as much again as the sum, also where nothing records it.
    if not torch.is_grad_enabled():
        return _total(x, group_name)
    y: torch.Tensor = _Sum.apply(x, group_name)  # type: ignore[no-untyped-call]
    return y


def _total(x: torch.Tensor, group_name: str) -> torch.Tensor:
    if group_name:
        # What torch.compile traces: it looks no group up by its name.
        functional = torch.ops._c10d_functional
        result: torch.Tensor = functional.wait_tensor(
            functional.all_reduce(x.contiguous(), "sum", group_name)
        )
        return result
    # The all-reduce works in place, and the gradient belongs to autograd.
    total = x.clone(memory_format=torch.contiguous_format)
    if not is_alone(None):
        dist.all_reduce(total)
    return total


class _Replicated(torch.autograd.Function):
    """The identity of tensors, whose gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, group_name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group_name = group_name
        # Autograd would take the same tensor for an input that is returned as it is.
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        name = ctx.group_name
        is_one_call = name and len(grads) > 1 and len({grad.dtype for grad in grads}) == 1
        if not is_one_call or torch.is_grad_enabled():
            return None, *(summed(grad, name) for grad in grads)
        functional = torch.ops._c10d_functional
        totals = functional.all_reduce_coalesced([grad.contiguous() for grad in grads], "sum", name)
        return None, *map(functional.wait_tensor, totals)


class _Sum(torch.autograd.Function):
    """The sum over the ranks, whose gradient every rank has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        return _total(x, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return replicated(grads[0], ctx.group_name), None
