"""Symmetric memory that operators hand out as their results: peers write straight into the tensor
that a call returns.

A group has a few buffers in one block. Each rank *takes* one for a call by itself, whichever is
free, and tells its peers which in the kernel (a *grant*); nothing is agreed on the host. A buffer
is free again when the last view of the tensor that it was handed out as is gone. One further
buffer, the *landing*, is never handed out: it receives what is copied, or used up by the same call.

Stream order protects what the host cannot see: a tensor may be dropped while kernels still read it,
and the next call of the group comes after them on their stream, as with torch's caching allocator.
A tensor that is read on another stream must live until the group's stream has waited for that one.
``Tensor.record_stream`` does nothing for such a tensor: its memory is not of torch's allocator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from interlace.comm.dlpack import bytes_at, view_as
from interlace.units import round_up

if TYPE_CHECKING:
    from interlace.comm.group import Group
    from interlace.comm.memory import Block

BUFFERS = 2
"""Tensors that may be alive at once before a call has to copy its result: this step's, and the last
one's.
"""

LANDING = BUFFERS
"""The landing's index, after the buffers."""


@dataclasses.dataclass
class _Space:
    """One block of buffers. ``capture`` names the graph capture that a buffer belongs to for good,
    if any.
    """

    block: Block
    buffer_bytes: int
    taken: list[bool]
    capture: list[int | None]


class _Lease:
    """Owns a buffer for as long as a tensor over it lives."""

    def __init__(self, space: _Space, index: int) -> None:
        self._space, self._index = space, index
        space.taken[index] = True

    def __del__(self) -> None:
        self._space.taken[self._index] = False


@dataclasses.dataclass(frozen=True)
class Output:
    """Where one call's result arrives.

    Attributes:
        address: of rank 0's copy of the *first* buffer, for kernels.
        buffer_bytes: between two buffers.
        index: of the buffer that this rank takes; :data:`LANDING` if none is free.
    """

    address: int
    buffer_bytes: int
    index: int
    _mine: int
    _space: _Space

    @property
    def lent(self) -> bool:
        """Whether the tensor is the caller's; else it must be copied at once."""
        return self.index != LANDING

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """``[*shape]`` of ``dtype`` over the buffer, which is free again when the last view of it
        is gone.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        owner: object = self._space.block
        if self.index != LANDING:
            owner = _Lease(self._space, self.index)
        raw = bytes_at(self._mine, (nbytes,), (1,), device, owner)
        return view_as(raw, shape, dtype)


class OutputPool:
    """The buffers of one group; see the module."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._space: _Space | None = None
        self._retained: list[_Space] = []

    def take(self, nbytes: int) -> Output:
        """A buffer of at least ``nbytes``. Collective where they must grow: every rank asks for as
        many bytes.

        Raises:
            WorkspaceError: the buffers must grow while a CUDA graph is being captured, or do not
                fit.
        """
        space = self._reserve(nbytes)
        capture = self._group.capture_id()
        index = LANDING
        for i in range(BUFFERS):
            if not space.taken[i] and space.capture[i] in (None, capture):
                index = i
                break
        return self._output(space, index, capture)

    def landing(self, nbytes: int) -> Output:
        """The landing, of at least ``nbytes``; as :meth:`take`."""
        return self._output(self._reserve(nbytes), LANDING, self._group.capture_id())

    @property
    def nbytes(self) -> int:
        """Symmetric bytes held on this rank."""
        return sum(
            space.block.nbytes
            for space in [*self._retained, *([self._space] if self._space else [])]
        )

    def release(self) -> None:
        """Forget all buffers; those whose tensors are alive stay until these are gone."""
        self._space = None
        self._retained.clear()

    def _output(self, space: _Space, index: int, capture: int | None) -> Output:
        if capture is not None:
            # A captured graph writes where it wrote whenever it is replayed: a buffer is nobody
            # else's from then on, and the block, also if it is the landing that was captured,
            # outlives the space.
            space.capture[index] = capture
        address, size = space.block.address, space.buffer_bytes
        mine = address + self._group.rank * space.block.stride + index * size
        return Output(address, size, index, mine, space)

    def _reserve(self, nbytes: int) -> _Space:
        old = self._space
        if old is not None and old.buffer_bytes >= nbytes:
            return old
        size = round_up(max(nbytes, 1), 4096)
        with self._group.indivisible("growing the memory of outputs"):
            block = self._group.allocate((BUFFERS + 1) * size)
            if old is not None and any(capture is not None for capture in old.capture):
                self._retained.append(old)
            self._space = space = _Space(block, size, [False] * BUFFERS, [None] * (BUFFERS + 1))
        return space
