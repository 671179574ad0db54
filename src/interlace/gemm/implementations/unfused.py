"""``impl="unfused"``: what a program without Interlace runs, ``F.linear`` and torch.distributed."""

from __future__ import annotations

from typing import Any

from interlace.comm.groups.reservation import Reservation
from interlace.gemm.call import GemmCall
from interlace.registry import Implementation


def run(call: GemmCall) -> Any:
    """Run the two steps one after the other; it takes any operands, on any backend."""
    call.group.check()
    return call.operator.run_unfused(call)


# On GPUs the collective is NCCL's.
UNFUSED = Implementation(
    "unfused",
    "F.linear, then torch.distributed's collective",
    run,
    spans_nodes=True,
    alias="nccl",
    reservation=lambda _: Reservation(),
)
