"""The GPU that a choice is for."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import torch


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that choices depend on. It stands for the device where a choice is of
    a GPU that need not be here.

    Attributes:
        name: As ``torch.cuda.get_device_name`` has it.
        processors: The number of streaming multiprocessors.
        shared_bytes: Shared memory that a program may have.
        type: As ``torch.device`` has it.
    """

    name: str
    processors: int
    shared_bytes: int
    type: ClassVar[str] = "cuda"

    @staticmethod
    @functools.cache
    def of(device: torch.device | Gpu) -> Gpu:
        """Return the properties of a device."""
        if isinstance(device, Gpu):
            return device
        properties = torch.cuda.get_device_properties(device)
        least = properties.shared_memory_per_block
        shared_bytes = int(getattr(properties, "shared_memory_per_block_optin", least))
        name = torch.cuda.get_device_name(device)
        return Gpu(name, properties.multi_processor_count, shared_bytes)

    def stages_that_fit(self, most: int, stage_bytes: int, *, beside: int) -> int:
        """Return the stages of a software pipeline for which a program has shared memory.

        Args:
            most: Stages at most; at least one is returned.
            stage_bytes: Bytes of the operands of a stage.
            beside: Bytes that the program needs for something else.
        """
        return max(1, min(most, (self.shared_bytes - beside) // stage_bytes))
