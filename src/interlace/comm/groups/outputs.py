"""Return symmetric memory from operators: peers write into the tensor that a call returns.

A group has a few buffers in one block. Each rank *takes* a free one for a call by itself, and tells
its peers which one in the kernel (a *grant*); nothing is agreed on the host. A buffer is free again
when the last view of the tensor over it is gone. One further buffer, the *landing*, is never handed
out: it receives data that the same call copies or uses up.

Stream order protects what the host cannot see: a tensor may be dropped while kernels still read it,
and the next call of the group comes after them on their stream, as with torch's caching allocator.
A tensor that is read on another stream must live until the group's stream has waited for that one.
``Tensor.record_stream`` does nothing for such a tensor: its memory is not of torch's allocator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from interlace.comm.groups.reservation import BUFFERS as BUFFERS
from interlace.comm.groups.reservation import bytes_of_buffer
from interlace.comm.host.health import Health
from interlace.comm.host.members import Members
from interlace.comm.replay.memory import Block
from interlace.comm.replay.replays import Replays
from interlace.comm.runtime.dlpack import tensor_at
from interlace.comm.runtime.ordinary import in_inductors_run
from interlace.comm.runtime.streams import Streams

LANDING = BUFFERS
"""The landing's index, after the buffers."""


@dataclasses.dataclass
class _Space:
    """Hold one block of buffers.

    Attributes:
        block: Symmetric memory of all buffers, the landing last.
        buffer_bytes: Bytes of one buffer.
        in_use: Whether a tensor over the buffer is alive, per buffer without the landing.
        capture: Id of the graph capture that a buffer belongs to for good, per buffer; None if it
            belongs to none.
    """

    block: Block
    buffer_bytes: int
    in_use: list[bool]
    capture: list[int | None]


class _Lease:
    """Hold a buffer for as long as a tensor over it lives."""

    def __init__(self, space: _Space, index: int) -> None:
        self._space, self._index = space, index
        space.in_use[index] = True

    def __del__(self) -> None:
        self._space.in_use[self._index] = False


class Destination(NamedTuple):
    """Say which of several buffers a kernel's result goes to, and where they lie.

    Attributes:
        address: Address of rank 0's copy of the *first* buffer.
        buffer_bytes: Bytes between two buffers.
        own_index: Index of the buffer that this rank's result goes to.
    """

    address: int
    buffer_bytes: int
    own_index: int

    @property
    def own_address(self) -> int:
        """Return the address of rank 0's copy of the buffer that this rank's result goes to."""
        return self.address + self.own_index * self.buffer_bytes


@dataclasses.dataclass(frozen=True)
class Output:
    """Describe the buffer in which one call's result arrives.

    Attributes:
        destination: The buffer as launches take it; its index is :data:`LANDING` if none is free.
        local_address: Address of this rank's copy of it.
    """

    destination: Destination
    local_address: int
    _space: _Space

    @property
    def lent(self) -> bool:
        """Return whether the caller may keep the tensor; if not, it must copy it at once."""
        return self.destination.own_index != LANDING

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a tensor ``[*shape]`` of ``dtype`` over the buffer.

        The buffer is free again when the last view of the tensor is gone. The tensor itself is no
        view: one that is made where nothing is recorded could not be changed in place by what is.
        """
        owner: object = self._space.block
        if self.lent:
            owner = _Lease(self._space, self.destination.own_index)
        return tensor_at(self.local_address, shape, dtype, device, owner)


def taking_output(
    nbytes: int, shape: Sequence[int], dtype: torch.dtype
) -> Callable[[Any], tuple[Output, torch.Tensor]]:
    """Return what takes a group's buffer for a call, and the tensor over it, for
    :class:`DeferredCall`.

    Args:
        nbytes: The bytes of the buffer, as many on every rank.
        shape, dtype: The tensor's.
    """

    def take(group: Any) -> tuple[Output, torch.Tensor]:
        output = group.outputs.take(nbytes)
        return output, output.tensor(shape, dtype, group.device)

    return take


def destination_of(output: Output, y: torch.Tensor) -> Destination:
    """Return what the work into a buffer depends on."""
    return output.destination


def kept(output: Output, y: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may outlive the call: memory that is not lent is the landing, which the
    next call writes again, so that is copied.
    """
    return y if output.lent else y.clone(memory_format=torch.contiguous_format)


class OutputPool:
    """Manage the output buffers of one group; see the module."""

    def __init__(
        self,
        members: Members,
        health: Health,
        streams: Streams,
        replays: Replays,
        allocate: Callable[[int], Block],
        any_rank_now: Callable[[str, bool], bool],
        show: Callable[[], None],
    ) -> None:
        """Create an empty pool.

        Args:
            members: The group.
            health: Is told when growth is interrupted on this rank.
            streams: Know the capture that a buffer may belong to.
            replays: Know whether that capture is a graph of the group's own.
            allocate: Allocates so many bytes of symmetric memory; collective.
            any_rank_now: Returns whether an answer is True on any rank; collective.
            show: Is called when the pool has grown.
        """
        self._members, self._health, self._streams = members, health, streams
        self._replays, self._allocate, self._any_rank_now = replays, allocate, any_rank_now
        self._show = show
        self._space: _Space | None = None
        self._retained: list[_Space] = []

    def take(self, nbytes: int) -> Output:
        """Return a free buffer of at least ``nbytes``, or the landing if none is free.

        In a run of which Inductor makes a CUDA graph it is the landing: results belong to the
        graph's pool there (``interlace.comm.runtime.ordinary``).

        Collective if the buffers must grow: every rank asks for equally many bytes.

        Raises:
            WorkspaceError: The buffers must grow while a CUDA graph is being captured, or do not
                fit.
        """
        if in_inductors_run():
            return self.landing(nbytes)
        space = self._reserve(nbytes)
        capture = self._capture()
        index = LANDING
        # The peers need not agree to it: the kernel tells them which buffer it is.
        for i in range(BUFFERS):
            # A buffer of a captured graph serves calls of the same capture only.
            if not space.in_use[i] and space.capture[i] in (None, capture):
                index = i
                break
        return self._output(space, index, capture)

    def landing(self, nbytes: int) -> Output:
        """Return the landing, of at least ``nbytes``; growth is collective, as in :meth:`take`.

        Raises:
            WorkspaceError: The buffers must grow while a CUDA graph is being captured, or do not
                fit.
        """
        return self._output(self._reserve(nbytes), LANDING, self._capture())

    def _capture(self) -> int | None:
        """Return the program's capture that is going on, to which buffers belong from then on."""
        return None if self._replays.capturing else self._streams.capture_id()

    def missing(self, nbytes: int) -> int:
        """Return the bytes that would be allocated if a call asked for ``nbytes`` now."""
        previous = 0 if self._space is None else self._space.buffer_bytes
        return 0 if previous >= nbytes else (BUFFERS + 1) * bytes_of_buffer(nbytes, previous)

    @property
    def nbytes(self) -> int:
        """Return the symmetric bytes that the pool holds on this rank."""
        spaces = [*self._retained, *([self._space] if self._space else [])]
        return sum(space.block.nbytes for space in spaces)

    def release(self) -> None:
        """Forget all buffers; memory stays mapped until the tensors over it are gone."""
        self._space = None
        self._retained.clear()

    def _output(self, space: _Space, index: int, capture: int | None) -> Output:
        """Return the output over a buffer, which belongs to ``capture`` from now on."""
        if capture is not None:
            # A captured graph writes to the same address whenever it is replayed. So the buffer
            # belongs to the graph from now on, and the block outlives its replacement, even if only
            # the landing was captured.
            space.capture[index] = capture
        destination = Destination(space.block.address, space.buffer_bytes, index)
        local_address = destination.own_address + self._members.rank * space.block.stride
        return Output(destination, local_address, space)

    def _reserve(self, nbytes: int) -> _Space:
        """Return the oldest space with buffers of ``nbytes``; a new one if there is none.

        All ranks keep the same spaces, so ranks that enqueue or capture a call meet peers that
        replay an earlier capture of it.
        """
        previous = self._space
        if previous is not None and previous.buffer_bytes >= nbytes:
            kept = (space for space in self._retained if space.buffer_bytes >= nbytes)
            return next(kept, previous)
        size = bytes_of_buffer(nbytes, 0 if previous is None else previous.buffer_bytes)
        with self._health.indivisible("growing the memory of outputs"):
            block = self._allocate((BUFFERS + 1) * size)
            if previous is not None and self._any_rank_now(
                "captured outputs", any(capture is not None for capture in previous.capture)
            ):
                self._retained.append(previous)
            space = _Space(block, size, [False] * BUFFERS, [None] * (BUFFERS + 1))
            self._space = space
        self._show()
        return space
