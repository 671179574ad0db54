"""A call that one rank does not make, on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import interlace
from tests.errors import error_of


def call_without(absent: int, make: Callable[[], torch.Tensor]) -> tuple[str, int, float, bool] | None:
    """After calls of all ranks, ``make`` on all but one. None on that one; elsewhere what became of it.

    Returns:
        The error's type, the peer that it names, the share of the result that is NaN, and whether the GPU was soon free again.
    """
    interlace.synchronize()
    interlace.set_deadline(1.0)
    if dist.get_rank() == absent:
        dist.barrier()
        return None
    start = time.monotonic()
    y = make()
    kind, _, fields = error_of(interlace.synchronize)
    outcome = kind, fields["peer"], y.isnan().float().mean().item(), time.monotonic() - start < 10
    dist.barrier()
    return outcome
