"""The ceilings of a machine, and the floor of an operation's time on it."""

from __future__ import annotations

import dataclasses
import math

from interlace.units import GB, NS_PER_S


@dataclasses.dataclass(frozen=True)
class Machine:
    """Ceilings of one GPU in a node.

    Attributes:
        memory_bytes_per_s: Bytes per second that device memory reads and writes in a copy.
        link_bytes_per_s: Bytes per second that leave a GPU for all its peers together.
        flops_per_s: FLOPs per second of dense 16-bit products.
        source: Source of the figures.
    """

    name: str
    memory_bytes_per_s: float
    link_bytes_per_s: float
    source: str
    flops_per_s: float = math.inf

    def floor_ns(self, memory_bytes: float, link_bytes: float, flops: float = 0.0) -> float:
        """Return the time in nanoseconds of the least work at this machine's ceilings.

        It is the longest of moving the memory bytes, moving the link bytes, and multiplying. An
        execution undercuts it by as much as it gets above a ceiling: that of the memory is the
        speed of a copy, and kernels that mostly read have reached 4.7 TB/s on an H200.
        """
        # The three resources work at the same time at best, so the longest of them is the floor.
        return NS_PER_S * max(
            memory_bytes / self.memory_bytes_per_s,
            link_bytes / self.link_bytes_per_s,
            flops / self.flops_per_s,
        )


H200_NODE = Machine(
    name="4 x NVIDIA H200 (SXM), NVLink 18 per pair",
    memory_bytes_per_s=4200 * GB,
    link_bytes_per_s=380 * GB,
    flops_per_s=989.5e12,
    # Ceilings are measured where they can be: a data sheet's link rate is never reached.
    source="device-to-device copy 4160 GB/s, reads a little faster; copy-engine all-to-all "
    "380 GB/s per GPU; measured 2026-11; 989.5 TFLOP/s dense bfloat16 of the data sheet",
)
