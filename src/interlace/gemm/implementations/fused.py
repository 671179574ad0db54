"""``impl="fused"``: the operator's own kernel, which communicates while it multiplies."""

from __future__ import annotations

from typing import Any

from interlace.gemm.call import GemmCall
from interlace.registry import Implementation


def run(call: GemmCall) -> Any:
    """Run the operator's kernel; it takes any operands."""
    return call.operator.run_fused(call)


FUSED = Implementation(
    "fused", "one kernel that sends tiles as it computes them", run, schedule="tiled"
)
