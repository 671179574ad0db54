"""What a machine can do at best; the physical floor of an operation on it."""

from __future__ import annotations

import dataclasses

from interlace.units import GB, NS_PER_S


@dataclasses.dataclass(frozen=True)
class Machine:
    """Ceilings of one GPU in a node.

    Attributes:
        memory_bytes_per_s: reading and writing device memory.
        link_bytes_per_s: leaving a GPU for all its peers together.
        source: where the figures come from.
    """

    name: str
    memory_bytes_per_s: float
    link_bytes_per_s: float
    source: str

    def floor_ns(self, memory_bytes: float, link_bytes: float) -> float:
        """No execution is faster: the longer of moving the memory bytes and moving the link bytes."""
        return NS_PER_S * max(memory_bytes / self.memory_bytes_per_s, link_bytes / self.link_bytes_per_s)


H200_NODE = Machine(
    name="4 x NVIDIA H200 (SXM), NVLink 18 per pair",
    memory_bytes_per_s=4200 * GB,
    link_bytes_per_s=380 * GB,
    source="device-to-device copy 4160 GB/s, reads a little faster; copy-engine all-to-all 380 GB/s per GPU; measured 2026-11",
)
