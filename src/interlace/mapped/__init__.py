"""Outputs in peers' memory: any kernel's ordinary stores become communication.

See ``docs/mapped-outputs.md``.
"""

from interlace.mapped.collectives import COLLECTIVES, TRANSPORTS, Fused, fuse
from interlace.mapped.output import MappedOutput, RotatingInput, empty_rotating
from interlace.mapped.triggered import TriggeredTransfers

__all__ = [
    "COLLECTIVES",
    "TRANSPORTS",
    "Fused",
    "MappedOutput",
    "RotatingInput",
    "TriggeredTransfers",
    "empty_rotating",
    "fuse",
]
