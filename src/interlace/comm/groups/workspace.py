"""Describe the memory that belongs to one operator of one group."""

from __future__ import annotations

import dataclasses

import torch

from interlace.comm.replay.memory import Block
from interlace.comm.runtime.dlpack import bytes_at
from interlace.units import next_power_of_2

# A power of two: ``il.arrive_last`` tells the end of a round by a remainder.
MAX_PROGRAMS = 4096
"""Largest number of programs in one launch of an operator; each has an epoch cell (see
``interlace.language``).
"""

_MIN_HALF_BYTES = 4096
_MIN_SIGNALS = 1024


@dataclasses.dataclass
class Workspace:
    """Hold the memory of one operator of one group; see :meth:`SymmetricMemory.workspace`.

    Attributes:
        data: Symmetric; two halves of ``half_bytes``, used in turn by the epoch's parity.
        half_bytes: Bytes of one half of ``data``.
        signals: Symmetric int32 ``[signal_count]``, each written by one rank only: the epoch of the
            writer's call and the call's mark.
        signal_count: Number of signals.
        epochs: Local int32 ``[MAX_PROGRAMS]``: number of the next call, per program.
        side_epochs: Local int32 ``[MAX_PROGRAMS]``: epochs of launches that run concurrently with
            an operator's kernel and may end before or after it.
        notes: Local int32 ``[2]``: values that an operator's first kernel leaves for later kernels
            of the same call.
        captured: Whether a CUDA graph of the program refers to the workspace.
    """

    data: Block
    half_bytes: int
    signals: Block
    signal_count: int
    epochs: torch.Tensor
    side_epochs: torch.Tensor
    notes: torch.Tensor
    captured: bool = False

    def suffices(self, half_bytes: int, signal_count: int) -> bool:
        """Return whether a call that needs so many bytes and signals finds them here."""
        return self.half_bytes >= half_bytes and self.signal_count >= signal_count

    def reset(self, rank: int) -> None:
        """Restore the initial state of ``rank``'s part while no kernel of any rank is running."""
        for block in (self.data, self.signals):
            bytes_at(
                block.address + rank * block.stride,
                (block.nbytes,),
                (1,),
                self.epochs.device,
                block,
            ).zero_()
        # Epoch 0 is what signals hold in fresh memory, so calls count from 1.
        self.epochs.fill_(1)
        self.side_epochs.fill_(1)
        self.notes.zero_()


def rounded_sizes(half_bytes: int, signal_count: int) -> tuple[int, int]:
    """Return the sizes of a new workspace: powers of two, so that it seldom grows."""
    return (
        next_power_of_2(max(half_bytes, _MIN_HALF_BYTES)),
        next_power_of_2(max(signal_count, _MIN_SIGNALS)),
    )


def make_workspace(
    data: Block, half_bytes: int, signals: Block, signal_count: int, device: torch.device
) -> Workspace:
    """Return a workspace over zeroed blocks; its epochs begin at 1."""
    return Workspace(
        data=data,
        half_bytes=half_bytes,
        signals=signals,
        signal_count=signal_count,
        epochs=torch.ones(MAX_PROGRAMS, dtype=torch.int32, device=device),
        side_epochs=torch.ones(MAX_PROGRAMS, dtype=torch.int32, device=device),
        notes=torch.zeros(2, dtype=torch.int32, device=device),
    )
