"""Tensors that are the same on every rank, where they are used on each rank for something else.

The gradient of such a tensor is the sum of what each rank's use of it contributes. An operator
whose result is the same on every rank (an all-reduce) has a gradient that is, too; its formula uses
that gradient on each rank for another part of the operands, so a second derivative needs the sum.
Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), f and g.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import process_group_named
from interlace.gemm.reference import is_alone


def replicated(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """``x`` itself, which every rank of the group has; its gradient is summed over the ranks.

    The backward pass is collective. The sum can be differentiated again.
    """
    y: torch.Tensor = _Replicated.apply(x, group_name)  # type: ignore[no-untyped-call]
    return y


class _Replicated(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(grads[0], ctx.group_name), None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """The sum over the ranks, whose gradient every rank has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        total = x.clone(memory_format=torch.contiguous_format)
        group = process_group_named(group_name)
        if not is_alone(group):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return replicated(grads[0], ctx.group_name), None
