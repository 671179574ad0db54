"""The group's memory: one address range per process in which rank r's memory starts at ``base + r *
stride``.

Both backends reserve the range once per group, with room for every rank, and map blocks into it::

    address   base            base + stride     base + 2 * stride
              | rank 0 ....   | rank 1 ....     | rank 2 ....
    block A   [##]            [##]              [##]
    block B      [####]          [####]            [####]

The stride is one constant of the group, so a kernel reaches a peer's copy of *any* symmetric
address by adding a multiple of it. Where a block lies within a rank's part is each process's own
affair.

Who owns what: a group owns its heap, and the heap its range. A block, and every tensor over it,
keeps the range but neither the heap nor the group, so memory may outlive its group. What a
finalizer refers to is numbers and the range: a finalizer lives as long as its object, and would
keep alive for ever a group that owns the object.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from interlace.comm.releases import releases
from interlace.errors import WorkspaceError
from interlace.units import format_bytes, round_up


class FreeList:
    """First-fit allocator of offsets in ``[0, size)``; adjacent free spans are merged."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]
        # Of threads; a finalizer that interrupts its holder would wait for ever, hence put_off
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        with releases.put_off(), self._lock:
            for i, (start, end) in enumerate(self._free):
                if end - start >= nbytes:
                    self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                    return start
        raise WorkspaceError(
            "symmetric memory must fit in the address range reserved for a rank; "
            f"{format_bytes(nbytes)} more do not. "
            f"Free tensors that are no longer needed."
        )

    def give(self, start: int, nbytes: int) -> None:
        merged: list[tuple[int, int]] = []
        with releases.put_off(), self._lock:
            for span in sorted([*self._free, (start, start + nbytes)]):
                if merged and merged[-1][1] == span[0]:
                    merged[-1] = (merged[-1][0], span[1])
                else:
                    merged.append(span)
            self._free = merged


def call_when_gone(owner: object, device: torch.device, release: Callable[[], object]) -> None:
    """Call ``release`` once ``owner`` is gone and ``device`` has done what it was given; not at the
    process's end.

    Args:
        release: must not refer to ``owner``, nor to anything that does.
    """
    finalizer = weakref.finalize(owner, releases.put, device, release)
    finalizer.atexit = False  # the process's end unmaps everything


class Range:
    """A reserved address range with room for every rank, which is given back once its heap and all
    its blocks are gone.

    Attributes:
        base: address of rank 0's part.
        stride: bytes of each rank's part.
        offsets: what is free in each of them.
    """

    def __init__(
        self, base: int, stride: int, device: torch.device, free: Callable[[], object]
    ) -> None:
        """Own the range at ``base``, which ``free()`` gives back."""
        self.base, self.stride = base, stride
        self.offsets = FreeList(stride)
        call_when_gone(self, device, free)


class Block:
    """One collective allocation: the same number of zeroed bytes on every rank, all of them mapped
    here.

    Attributes:
        address: of rank 0's bytes in this process; rank r's are at ``address + r * stride``.
        nbytes: usable bytes per rank, at least what was asked for.
        stride: bytes between two ranks' copies.
    """

    def __init__(
        self, address: int, nbytes: int, stride: int, device: torch.device,
        release: Callable[[], object]
    ) -> None:  # fmt: skip
        """Own the memory at ``address``, which ``release()`` unmaps once ``device`` does not use it
        any more.
        """
        self.address = address
        self.nbytes = nbytes
        self.stride = stride
        call_when_gone(self, device, release)


class Heap(ABC):
    """Allocates blocks for one group on one device. Every method call is collective."""

    device: torch.device
    stride: int
    granularity: int
    """Bytes of which a piece that can be mapped again must be a multiple."""

    @abstractmethod
    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        """Allocate ``pieces`` times ``nbytes`` zeroed bytes on every rank, visible to every rank
        when this returns.

        Pieces lie one behind the other, each rounded up to the granularity if there are several.
        """

    @abstractmethod
    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], object]]:
        """Map pieces of ``nbytes``, of any rank's memory and mapped here already, once more: one
        behind the other, as given.

        Not collective.

        Returns:
            The address of the first, and what undoes the mapping once the device is idle (see
            :func:`call_when_gone`).
        """


class SoloHeap(Heap):
    """The heap of a group of one: plain memory of the device, no peers to map."""

    granularity = 16

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stride = 0

    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        size = pieces * round_up(max(nbytes, 1), 4096)
        memory = torch.zeros(size + 256, dtype=torch.uint8, device=self.device)
        address = round_up(memory.data_ptr(), 256)
        # Torch's caching allocator takes the memory back in stream order; nothing has to wait.
        return Block(address, size, self.stride, torch.device("cpu"), [memory].clear)

    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], object]]:
        """One piece, as it is."""
        if len(addresses) != 1:
            raise WorkspaceError(
                "memory of a process on its own must be mapped once; it cannot be mapped again."
            )
        return addresses[0], lambda: None
