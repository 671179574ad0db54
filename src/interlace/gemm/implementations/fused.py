"""``impl="fused"``: the operator's own kernel, which communicates while it multiplies."""

from __future__ import annotations

from interlace.registry import Implementation

# The operator's kernel takes any operands.
FUSED = Implementation(
    "fused",
    "one kernel that sends tiles as it computes them",
    lambda call: call.operator.run_fused(call),
    schedule="tiled",
)
