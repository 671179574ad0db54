"""Outputs that live on peers: any kernel's ordinary stores become communication. See ``docs/mapped-outputs.md``."""

from interlace.mapped.collectives import COLLECTIVES, Fused, fuse, kept_product
from interlace.mapped.output import MappedOutput
from interlace.mapped.rotating import RotatingInput, empty_rotating

__all__ = ["COLLECTIVES", "Fused", "MappedOutput", "RotatingInput", "empty_rotating", "fuse", "kept_product"]
