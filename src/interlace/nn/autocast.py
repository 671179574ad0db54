"""Autocast for layers whose products are operators of Interlace."""

from __future__ import annotations

import torch

from interlace.errors import ArgumentError
from interlace.products.operands import FLOATS


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in autocast's dtype where autocast is enabled for its device, as ``F.linear`` takes its arguments.

    The conversion is part of the graph, so the tensor gets its gradient in its own dtype.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype not in FLOATS:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def operands(layer: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The input and the weight of a layer, as :func:`autocast` converts them.

    Raises:
        ArgumentError: x has another dtype than the weight, or lies on another device.
    """
    x, weight = autocast(x), autocast(weight)
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ArgumentError(
            f"{layer}: x must be {weight.dtype} on {weight.device}, like the weight; got {x.dtype} on {x.device}. "
            f"Convert x, or use torch.autocast."
        )
    return x, weight
