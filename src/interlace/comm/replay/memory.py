"""Lay out a group's memory: one address range per process, in which ranks are a stride apart; and
unmap memory whose owner is gone, at once or as soon as that is safe.

Both backends reserve the range once per group, with room for every rank, and map blocks into it::

    address   base            base + stride     base + 2 * stride
              | rank 0 ....   | rank 1 ....     | rank 2 ....
    block A   [##]            [##]              [##]
    block B      [####]          [####]            [####]

The stride is one constant of the group, so a kernel reaches a peer's copy of *any* symmetric
address by adding a multiple of it. Each process chooses the offset of a block within a rank's part
for itself.

A group owns its heap, and the heap owns its range. A block, and every tensor over it, keeps the
range but neither the heap nor the group, so memory may outlive its group. Finalizers refer to
numbers and the range only: a finalizer lives as long as its object, and would keep alive for ever a
group that owns the object.

A finalizer may run at any point of a program, perhaps while a CUDA graph is being captured, in the
middle of an allocation, or in a thread of a data loader. Unmapping a GPU's memory has to wait for
the GPU first, which makes a capture invalid. So finalizers put their releases into one queue, which
is emptied when that is safe.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from interlace.comm.runtime.conditions import Condition, returns
from interlace.comm.runtime.dlpack import tensor_at
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import WorkspaceError
from interlace.units import format_bytes, round_up


class ReleaseQueue:
    """Queue releases, each with the device whose kernels may still use the memory."""

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.device, Callable[[], object]]] = deque()
        self._holders: list[None] = []
        self._emptying = threading.Lock()

    def __len__(self) -> int:
        return len(self._pending)

    def condition(self) -> Condition:
        """Return the condition that nothing is to be released, where nothing is."""
        return returns(self._pending.__len__)

    def put(self, device: torch.device, release: Callable[[], object]) -> None:
        """Call ``release`` once ``device`` is idle: now if that is safe, or in :meth:`empty`."""
        self._pending.append((device, release))
        # Only the main thread may wait for a GPU now: CUDA reports captures of the calling thread's
        # stream only, and the main thread may be capturing.
        if device.type == "cpu" or threading.current_thread() is threading.main_thread():
            self.empty()

    def empty(self) -> None:
        """Perform all pending releases, unless the current stream is being captured.

        Nothing happens within :meth:`put_off` either.

        Raises:
            Exception: Any error of a release; later releases stay pending. If waiting for a device
                fails, its releases stay pending as well.
        """
        # A finalizer may interrupt this method in the same thread, so the lock must not block.
        if (
            not self._pending
            or self._holders
            or _capturing()
            or not self._emptying.acquire(blocking=False)
        ):
            return
        try:
            idle: set[torch.device] = set()
            while self._pending and not self._holders:
                device, release = self._pending[0]
                if device.type == "cuda" and device not in idle:
                    torch.cuda.synchronize(device)
                    idle.add(device)
                self._pending.popleft()
                release()
        finally:
            self._emptying.release()

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Put off all releases within the context.

        Callers change a list of free memory, or capture a graph, in which a release must not
        interfere.
        """
        self._holders.append(None)
        try:
            yield
        finally:
            self._holders.pop()


def _capturing() -> bool:
    """Return whether the current stream is being captured; CUDA is not initialised for that."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


releases = ReleaseQueue()
"""Queue of this process."""


class FreeList:
    """Allocate offsets in ``[0, size)`` by first fit; adjacent free spans are merged.

    Attributes:
        gap: Number of offsets that stay free before every span that is taken, also when a span
            before it is given back and taken again.
    """

    def __init__(self, size: int, gap: int = 0) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]
        self._size, self.gap = size, gap
        # The lock is for threads. A finalizer that interrupts the lock's holder in the same thread
        # would wait for ever, so releases are put off while the lock is held.
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        """Return the offset of ``nbytes`` that were free.

        Raises:
            WorkspaceError: No free span is large enough.
        """
        with releases.put_off(), self._lock:
            for i, (start, end) in enumerate(self._free):
                first, last = start + self.gap, start + self.gap + nbytes
                # What is taken behind this span keeps its own gap.
                if last <= (end if end == self._size else end - self.gap):
                    remaining = [(start, first), (last, end)]
                    self._free[i : i + 1] = [span for span in remaining if span[0] < span[1]]
                    return first
        raise WorkspaceError(
            "symmetric memory must fit in the address range reserved for a rank; "
            f"{format_bytes(nbytes)} more do not. "
            f"Free tensors that are no longer needed."
        )

    def give(self, start: int, nbytes: int) -> None:
        """Make the ``nbytes`` at offset ``start`` free again."""
        merged: list[tuple[int, int]] = []
        with releases.put_off(), self._lock:
            for span in sorted([*self._free, (start, start + nbytes)]):
                if merged and merged[-1][1] == span[0]:
                    merged[-1] = (merged[-1][0], span[1])
                else:
                    merged.append(span)
            self._free = merged


def call_when_gone(
    owner: object, device: torch.device, release: Callable[[], object], *, at_exit: bool = False
) -> weakref.finalize[..., Any]:
    """Call ``release`` once ``owner`` is garbage and ``device`` is idle.

    Args:
        owner: Object whose end is awaited.
        device: Device whose kernels may still use what is released.
        release: Releases the owner's resources. It must not refer to ``owner``, directly or
            indirectly, as the owner would never become garbage.
        at_exit: Whether it is called at the process's end as well, which unmaps everything itself.

    Returns:
        The finalizer, to be detached by an owner that has released its resources by itself.
    """
    finalizer = weakref.finalize(owner, releases.put, device, release)
    finalizer.atexit = at_exit
    return finalizer


_blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
"""The blocks whose memory exists, by their ``id``."""


def memory_of(rank: int) -> list[tuple[int, int]]:
    """Return the first address and the number of bytes of a rank's part of every block that has
    one.
    """
    # A list of references is made at once, while other threads may allocate.
    blocks = [block for block in (known() for known in _blocks.valuerefs()) if block is not None]
    # Behind the parts of a small group's ranks lies whatever was mapped there.
    return [(block.address_of(rank), block.nbytes) for block in blocks if rank < block.ranks]


class Range:
    """Own a reserved address range with room for every rank.

    The range is unreserved once its heap and all its blocks are gone.

    Attributes:
        base: Address of rank 0's part.
        stride: Bytes of each rank's part.
        offsets: Allocator of offsets, which are equal in all parts; ``gap`` bytes stay free before
            each block.
    """

    def __init__(
        self, base: int, stride: int, device: torch.device, free: Callable[[], object], gap: int = 0
    ) -> None:
        """Own the range at ``base``, which ``free()`` unreserves."""
        self.base, self.stride = base, stride
        self.offsets = FreeList(stride, gap)
        call_when_gone(self, device, free)


class Block:
    """Own one collective allocation: equally many bytes per rank, all mapped in this process.

    Attributes:
        address: Address of rank 0's bytes in this process; see :meth:`address_of`.
        nbytes: Usable bytes per rank, at least as many as were requested.
        stride: Bytes between two ranks' copies.
        ranks: Number of ranks.
    """

    def __init__(
        self, address: int, nbytes: int, stride: int, ranks: int, device: torch.device,
        release: Callable[[], object]
    ) -> None:  # fmt: skip
        """Own the memory at ``address``, which ``release()`` unmaps once ``device`` is idle."""
        self.address = address
        self.nbytes = nbytes
        self.stride = stride
        self.ranks = ranks
        _blocks[id(self)] = self
        call_when_gone(self, device, release)

    def address_of(self, rank: int) -> int:
        """Return the address of a rank's bytes."""
        return self.address + rank * self.stride

    @makes_ordinary_tensors
    def part_of(
        self, rank: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor over a rank's bytes, from the first one on; it keeps the block alive.

        It has a storage of its own, so that code which copies whole storages never touches the
        memory of others.
        """
        return tensor_at(self.address_of(rank), shape, dtype, device, self)

    def withdraw(self) -> None:
        """Leave the block out of :func:`memory_of`, because its memory is gone before it."""
        _blocks.pop(id(self), None)


class Heap(ABC):
    """Allocate blocks for one group on one device.

    Attributes:
        device: Device of the memory.
        base: Address of rank 0's part in this process; 0 where nothing is reserved.
        stride: Bytes between two ranks' copies of a symmetric address.
        granularity: Bytes of which a piece that can be mapped again must be a multiple.
    """

    device: torch.device
    base: int = 0
    stride: int
    granularity: int

    @abstractmethod
    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        """Allocate ``pieces`` times ``nbytes`` zeroed bytes on every rank. Collective.

        The memory is visible to every rank when this returns. Pieces are contiguous, each rounded
        up to the granularity if there are several.

        Raises:
            WorkspaceError: The memory does not fit on this rank, or on another one.
        """

    @abstractmethod
    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], object]]:
        """Map pieces of any rank's memory once more, contiguously in the order of ``addresses``.

        Not collective.

        Args:
            addresses: Address of each piece, which is mapped in this process already.
            nbytes: Bytes of one piece.

        Returns:
            The address of the first piece, and a function that undoes the mapping, to be called
            once the device is idle (see :func:`call_when_gone`).
        """


class SoloHeap(Heap):
    """Allocate the memory of a group of one by torch's allocator."""

    granularity = 16

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stride = 0

    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        """Allocate zeroed memory that torch's caching allocator takes back."""
        size = pieces * round_up(max(nbytes, 1), 4096)
        try:
            memory = self._zeros(size + 256)
        except (RuntimeError, TypeError) as error:  # the latter of more bytes than torch can count
            if isinstance(error, torch.AcceleratorError):
                raise
            raise WorkspaceError(
                f"symmetric memory must fit in this process; {format_bytes(size)} more do not. "
                "Free tensors that are no longer needed."
            ) from error
        address = round_up(memory.data_ptr(), 256)
        # Torch's caching allocator takes the memory back in stream order, so the release need not
        # wait for the GPU: it is treated as a release of the CPU.
        return Block(address, size, self.stride, 1, torch.device("cpu"), [memory].clear)

    @makes_ordinary_tensors
    def _zeros(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` zeroed bytes that outlive the call."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], object]]:
        """Return the address of a single piece, which need not be mapped again.

        Raises:
            WorkspaceError: There are several pieces.
        """
        if len(addresses) != 1:
            raise WorkspaceError(
                "memory of a process on its own must be mapped once; it cannot be mapped again."
            )
        return addresses[0], lambda: None
