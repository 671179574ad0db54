"""``impl="fused"``: the operator's own kernel, which communicates while it multiplies."""

from __future__ import annotations

from typing import Any

from interlace.comm.groups.reservation import Reservation
from interlace.gemm.call import GemmCall
from interlace.gemm.reservations import SizedProduct
from interlace.registry import Implementation


def run(call: GemmCall) -> Any:
    """Run the operator's kernel; it takes any operands."""
    return call.operator.run_fused(call)


def reservation(sized: SizedProduct) -> Reservation | None:
    """Return the symmetric memory of the operator's kernel."""
    return sized.operator.fused_reservation(sized)


FUSED = Implementation(
    "fused",
    "one kernel that sends tiles as it computes them",
    run,
    schedule="tiled",
    reservation=reservation,
)
