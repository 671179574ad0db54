"""Torch's collectives of equal parts, by the names that this version of torch has."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather(result: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather all ranks' x in ``result``."""
    # Named all_gather_single since torch 2.13, which warns of the older name.
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(result, x, group=group)


def scatter(result: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Add all ranks' parts and store this rank's rows of the sum in ``result``."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(result, parts, group=group)
