"""Share memory between processes of one machine: unnamed files, mapped at fixed distances.

The files have no name in any directory (``memfd_create``), and their descriptors pass between the
ranks directly: the memory is gone when the last process that maps it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Sequence

import torch

from interlace.comm.host.channel import HostChannel
from interlace.comm.host.descriptors import exchanged_descriptors
from interlace.comm.replay.memory import Block, Heap, Range
from interlace.errors import WorkspaceError
from interlace.units import GIB, format_bytes, round_up


class CpuHeap(Heap):
    """Allocate shared mappings at fixed distances; see the module."""

    def __init__(self, channel: HostChannel) -> None:
        """Reserve 64 GiB of addresses per rank; ``channel`` passes descriptors between ranks."""
        self.device = torch.device("cpu")
        self.granularity = mmap.PAGESIZE
        self.stride = 64 * GIB
        self._channel = channel
        size = self.stride * channel.members.world_size
        self.base = base = reserve(size)
        # A page without memory between blocks: a kernel that runs past the end of one is refused,
        # and never reaches the next.
        self._range = Range(
            base, self.stride, self.device, functools.partial(unmap, base, size),
            gap=self.granularity,
        )  # fmt: skip

    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        """Allocate zeroed shared memory on every rank; see :meth:`Heap.allocate`."""
        # Addresses of ranks of other nodes stay reserved and without memory: an access faults.
        ranks = self._channel.members.local_ranks
        size = pieces * round_up(max(nbytes, 1), self.granularity)
        with contextlib.ExitStack() as undo:
            offset, fds, failure = 0, [], None
            try:
                offset = self._range.offsets.take(size)
                undo.callback(_unmap, self._range, ranks, offset, size)
                fds = [_shared_file(size)]
            except WorkspaceError as error:
                # The peers must learn of the failure in the exchange before it is raised.
                failure = error
            with exchanged_descriptors(
                self._channel, "empty_symmetric", fds, failure
            ) as descriptors:
                for rank in ranks:
                    (descriptor,) = descriptors[rank]
                    address = self._range.base + rank * self.stride + offset
                    map_file(size, descriptor, address)
            # Nothing can fail any more, and the block owns the mappings from here on.
            undo.pop_all()
        release = functools.partial(_unmap, self._range, ranks, offset, size)
        base, world_size = self._range.base, self._channel.members.world_size
        return Block(base + offset, size, self.stride, world_size, self.device, release)

    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], object]]:
        """Map shared memory once more, contiguously; see :meth:`Heap.remap`."""
        size = len(addresses) * nbytes
        base = reserve(size)
        try:
            for i, address in enumerate(addresses):
                map_again(nbytes, address, base + i * nbytes)
        except WorkspaceError:
            unmap(base, size)
            raise
        return base, functools.partial(unmap, base, size)


def _shared_file(nbytes: int) -> int:
    """Return the descriptor of a new unnamed file of ``nbytes`` zeros.

    Raises:
        WorkspaceError: The operating system refuses.
    """
    try:
        fd = os.memfd_create("interlace")
        try:
            os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise WorkspaceError(
            f"shared memory of {format_bytes(nbytes)} must be available; got {error.strerror}."
        ) from error
    return fd


def _unmap(reserved: Range, ranks: Sequence[int], offset: int, size: int) -> None:
    """Unmap ``size`` bytes per rank and free their offset; the addresses stay reserved."""
    for rank in ranks:
        # Reserving replaces the mapping. Unmapping alone would let the operating system give the
        # addresses to somebody else while the range still counts on them.
        reserve(size, reserved.base + rank * reserved.stride + offset)
    reserved.offsets.give(offset, size)


# The operating system's ``mmap``, ``mremap`` and ``munmap`` at addresses that the caller chooses,
# which Python's ``mmap`` cannot: ranks' memory lies at fixed distances, and one file is mapped at
# several addresses.

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_address, _size, _int, _offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long
_libc.mmap.argtypes = (_address, _size, _int, _int, _int, _offset)
_libc.munmap.argtypes = (_address, _size)
_libc.mremap.argtypes = (_address, _size, _size, _int, _address)
# Without a type, ctypes would cut addresses to 32 bits.
_libc.mmap.restype = _libc.mremap.restype = _address


def reserve(nbytes: int, address: int | None = None) -> int:
    """Reserve addresses without memory and return the first.

    Args:
        address: The first address; what is mapped there is unmapped. None lets the operating system
            choose.

    Raises:
        WorkspaceError: the operating system refuses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return _map(nbytes, address, _PROT_NONE, flags, -1, 0)


def map_file(nbytes: int, fd: int, address: int | None = None, offset: int = 0) -> int:
    """Map ``nbytes`` of a file from ``offset`` on, to be read and written by all that map it.

    Args:
        address: Where; what is mapped there is replaced. None lets the operating system choose.

    Returns:
        The first address.

    Raises:
        WorkspaceError: the operating system refuses.
    """
    return _map(nbytes, address, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)


def map_again(nbytes: int, mapped: int, address: int) -> None:
    """Map the shared memory that lies at ``mapped`` at ``address`` too.

    Raises:
        WorkspaceError: the operating system refuses.
    """
    # For a shared mapping, an old size of 0 makes a second mapping (mremap(2)).
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    _require(_libc.mremap(mapped, 0, nbytes, flags, address), nbytes)


def unmap(address: int, nbytes: int) -> None:
    """Unmap memory or free reserved addresses."""
    _libc.munmap(address, nbytes)


def _map(
    nbytes: int, address: int | None, protection: int, flags: int, fd: int, offset: int
) -> int:
    fixed = 0 if address is None else _MAP_FIXED
    return _require(_libc.mmap(address, nbytes, protection, flags | fixed, fd, offset), nbytes)


def _require(address: int | None, nbytes: int) -> int:
    if address is None or address == _FAILED:
        error = os.strerror(ctypes.get_errno())
        raise WorkspaceError(f"shared memory of {format_bytes(nbytes)} cannot be mapped: {error}.")
    return address
