"""Autocast for layers whose products are operators of Interlace."""

from __future__ import annotations

from typing import Any

import torch

from interlace.errors import ArgumentError
from interlace.gemm.operands import FLOATS


def operands(
    layer: str, x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None
) -> tuple[Any, ...]:
    """What a layer multiplies: its arguments, in autocast's dtype where autocast is enabled, as
    ``F.linear`` does it.

    The conversions are part of the graph, so each tensor gets its gradient in its own dtype.

    Args:
        layer: The layer's name, for errors.
        x: The input.
        weight: The parameter that x is multiplied with.
        others: Further parameters; None for one that the layer does not have.

    Returns:
        x, weight and the others.

    Raises:
        ArgumentError: x has another dtype than the weight.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, *others = (  # type: ignore[assignment]
            tensor.to(dtype) if tensor is not None and tensor.dtype in FLOATS else tensor
            for tensor in (x, weight, *others)
        )
    if x.dtype != weight.dtype:
        raise ArgumentError(
            f"{layer}: x must have the weight's dtype, {weight.dtype}; got {x.dtype}. Convert x, "
            "or use torch.autocast."
        )
    return x, weight, *others
