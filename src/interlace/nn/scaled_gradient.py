"""A tensor whose gradient is scaled on its way back."""

from __future__ import annotations

from typing import Any

import torch


class _ScaleGradient(torch.autograd.Function):
    """Return the input unchanged, and multiply its gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``x`` unchanged; the gradient that reaches ``x`` is multiplied by ``factor``.

    Args:
        x: Tensor of a floating-point dtype, any shape.
        factor: Of the gradient.
    """
    scaled: torch.Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled


__all__ = ["scale_gradient"]
