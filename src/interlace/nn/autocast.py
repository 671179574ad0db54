"""Autocast for layers whose matrix products are operators of Interlace."""

from __future__ import annotations

from typing import Any

import torch

from interlace.errors import ArgumentError
from interlace.gemm.operands import FLOATS, require_device, require_float


def operands(
    layer: str, x: torch.Tensor, weight: torch.Tensor, *parameters: torch.Tensor | None
) -> tuple[Any, ...]:
    """Convert a layer's operands to autocast's dtype if autocast is enabled, as ``F.linear`` does.

    The conversions are part of the graph, so each tensor gets its gradient in its own dtype.

    Args:
        layer: Name of the layer, for errors.
        x: Input.
        weight: Parameter that x is multiplied with.
        parameters: Further parameters; None for a parameter that the layer does not have.

    Returns:
        x, weight and the further parameters.

    Raises:
        ArgumentError: The dtype or the device of x is not that of the weight, or the operators
            have no such dtype.
    """
    # Autocast converts the arguments of torch's own operators only, so a layer that calls
    # Interlace's must convert its operands itself.
    device = x.device.type
    # Autocast does not know the meta device, and torch 2.11 cannot trace the question whether it
    # knows a device.
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, *parameters = (  # type: ignore[assignment]
            tensor.to(dtype) if tensor is not None and tensor.dtype in FLOATS else tensor
            for tensor in (x, weight, *parameters)
        )
    if x.dtype != weight.dtype:
        raise ArgumentError(
            f"{layer}: x must have the weight's dtype, {weight.dtype}; got {x.dtype}. Convert x, "
            "or use torch.autocast."
        )
    # A layer whose forward pass is one of torch's products would meet the operator, and its
    # refusal, only in the backward pass.
    require_device(f"{layer}: x", x, "the weight", weight.device)
    require_float(f"{layer}: x and weight", x.dtype)
    return x, weight, *parameters
