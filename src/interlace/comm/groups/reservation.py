"""Compute how much symmetric memory a call needs, before any of it is allocated.

Launches ask for their memory by these sizes, and ``interlace.explain`` and a group's limit
(``INTERLACE_MAX_WORKSPACE``) go by the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

from interlace.units import next_power_of_2, round_up

BUFFERS = 2
"""Number of tensors over output buffers that may be alive at once before a call has to copy its
result: the tensor of this step and that of the previous one.
"""

GPU_GRANULARITY = 1 << 21
"""Bytes of which every allocation on a GPU is a multiple, as current drivers have it."""

CPU_GRANULARITY = 4096
"""Bytes of which every allocation on the CPU backend is a multiple, on machines with such pages."""

_MIN_HALF_BYTES = 4096
_MIN_SIGNALS = 1024
_PAGE = 4096


class WorkspaceSize(NamedTuple):
    """The part of an operator's workspace that one call needs.

    Attributes:
        name: Name of the workspace: the operator's, mostly with a dot and the implementation's.
        half_bytes: Bytes of one of its two halves.
        signal_count: Number of int32 signals.
    """

    name: str
    half_bytes: int
    signal_count: int = 1

    def rounded(self) -> WorkspaceSize:
        """Return the size that is allocated, so that workspaces seldom grow: halves by an eighth
        larger at most, as programs have other uses for memory.
        """
        half_bytes = max(self.half_bytes, _MIN_HALF_BYTES)
        half_bytes = round_up(half_bytes, next_power_of_2(half_bytes) // 16)
        signal_count = next_power_of_2(max(self.signal_count, _MIN_SIGNALS))
        return self._replace(half_bytes=half_bytes, signal_count=signal_count)

    def nbytes(self, granularity: int) -> int:
        """Return the bytes of both halves and of the signals, which are allocated separately."""
        return round_up(2 * self.half_bytes, granularity) + round_up(
            4 * self.signal_count, granularity
        )


class MappedSize(NamedTuple):
    """Memory of a mapped output, which a group keeps for calls of some sizes.

    Attributes:
        key: By what the group tells its outputs apart.
        nbytes: Bytes of a piece.
        pieces: Number of pieces, each of which is a multiple of the granularity.
    """

    key: Hashable
    nbytes: int
    pieces: int


@dataclasses.dataclass(frozen=True)
class Reservation:
    """The symmetric memory that one call needs on each rank.

    Attributes:
        workspaces: Parts of workspaces, each of another name.
        output_bytes: Bytes of one of the group's output buffers, which all operators share; 0 if
            the call takes none.
        mapped: Mapped outputs.
    """

    workspaces: tuple[WorkspaceSize, ...] = ()
    output_bytes: int = 0
    mapped: tuple[MappedSize, ...] = ()

    def then(self, later: Reservation) -> Reservation:
        """Return what a call and a later pass of it need, of which each has workspaces of its own
        or the same ones.
        """
        first, second = self.output_bytes, later.output_bytes
        if first and second > bytes_of_buffer(first):
            first = bytes_of_buffer(second, bytes_of_buffer(first))
        workspaces = {size.name: size for size in (*self.workspaces, *later.workspaces)}
        mapped = (*self.mapped, *later.mapped)
        return Reservation(tuple(workspaces.values()), first or second, mapped)

    def nbytes(self, granularity: int) -> int:
        """Return the bytes that a group allocates for the call if it holds nothing before."""
        total = sum(size.rounded().nbytes(granularity) for size in self.workspaces)
        total += sum(output.pieces * round_up(output.nbytes, granularity) for output in self.mapped)
        if self.output_bytes:
            total += round_up((BUFFERS + 1) * bytes_of_buffer(self.output_bytes), granularity)
        return total


def bytes_of_buffer(output_bytes: int, previous_bytes: int = 0) -> int:
    """Return the bytes of one output buffer, of which a group has a landing beside the others.

    Args:
        output_bytes: Bytes that the buffer must have.
        previous_bytes: Bytes that one buffer had before.
    """
    # Sizes that grow by and by, as prompts' lengths do, shall not each be new memory.
    return round_up(max(output_bytes, previous_bytes // 4 * 5, 1), _PAGE)


__all__ = [
    "BUFFERS", "CPU_GRANULARITY", "GPU_GRANULARITY", "MappedSize", "Reservation", "WorkspaceSize",
    "bytes_of_buffer",
]  # fmt: skip
