"""``linears`` as steps of torch, which the kernel is checked against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def linears(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Compute ``x @ w.T + bias`` for each weight, one after another."""
    return [F.linear(x, w, bias) for w, bias in zip(weights, biases, strict=True)]
