"""A call that one rank does not make, on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import interlace
from tests.errors import error_of


def call_without(
    absent: int, make: Callable[[dist.ProcessGroup], torch.Tensor]
) -> tuple[str, int, float, bool] | None:
    """Make a call on a new group on all ranks, and then again on all but one.

    Args:
        absent: The rank that does not make the second call; None is returned there.
        make: Makes the call on a group.

    Returns:
        The type of the error, the peer that it names, the share of the result that is NaN, and
        whether the rank was told long before the deadline of other groups.
    """
    group = dist.new_group()
    make(group)
    interlace.synchronize(group)
    interlace.set_deadline(1.0, group)
    dist.barrier()
    if dist.get_rank() == absent:
        return None
    start = time.monotonic()
    y = make(group)
    kind, _, fields = error_of(interlace.synchronize, group)
    return kind, fields["peer"], y.isnan().float().mean().item(), time.monotonic() - start < 60
