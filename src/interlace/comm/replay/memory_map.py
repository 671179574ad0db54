"""The operating system's ``mmap``, ``mremap`` and ``munmap`` at addresses that the caller chooses.

Python's ``mmap`` cannot choose addresses. Here ranks' memory lies at fixed distances, and one file
is mapped at several addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from interlace.errors import WorkspaceError
from interlace.units import format_bytes

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
