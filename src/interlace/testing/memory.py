"""Symmetric memory of several ranks in one process: for each rank a view of all ranks' memory,
which nobody else sees.

A view holds what host operations of its rank need to see. What memory *is* at any time, the machine
knows: a view is only brought up to date where its rank loads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from interlace.comm.memory import Block, Heap
from interlace.errors import WorkspaceError
from interlace.testing.operations import Cells
from interlace.units import MIB, format_bytes, round_up

PART_BYTES = 64 * MIB
"""Symmetric memory of one rank. Only what is touched takes memory."""

MOST_CELLS = 1 << 18
"""Cells that a program may touch, of all ranks."""

Addresses = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]


_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _map(nbytes: int, fd: int, address: int | None = None, offset: int = 0) -> int:
    """Map part of a file, at ``address`` if one is given."""
    flags = mmap.MAP_SHARED | (0 if address is None else _MAP_FIXED)
    place = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if place is None or place == ctypes.c_void_p(-1).value:
        raise WorkspaceError(
            f"simulated memory of {format_bytes(nbytes)} cannot be mapped: "
            f"{os.strerror(ctypes.get_errno())}."
        )
    return int(place)


class FinerGrain(BaseException):
    """A value is smaller than the cells of simulated memory. No Exception: Triton's interpreter
    wraps those.
    """

    def __init__(self, grain: int) -> None:
        super().__init__(grain)
        self.grain = grain


class CellTable:
    """Numbers for the cells of all ranks' memory that anybody has touched, in the order in which
    they were.
    """

    def __init__(self, ranks: int, grain: int) -> None:
        self.grain = grain
        self.count = 0
        self._numbers = np.zeros(ranks * PART_BYTES // grain, np.intp)

    def cells_at(self, offsets: Offsets, itemsize: int) -> Cells:
        """The cells of elements of ``itemsize`` bytes."""
        if itemsize % self.grain or (offsets % self.grain).any():
            raise FinerGrain(
                next(
                    grain
                    for grain in (2, 1)
                    if itemsize % grain == 0 and not (offsets % grain).any()
                )
            )
        words = (offsets[:, None] // self.grain + np.arange(itemsize // self.grain)).ravel()
        numbers: Cells = self._numbers[words]
        if not numbers.all():
            new = np.unique(words[numbers == 0])
            self._numbers[new] = np.arange(self.count + 1, self.count + 1 + len(new))
            self.count += len(new)
            if self.count > MOST_CELLS:
                raise WorkspaceError(
                    "an explored program must touch at most "
                    f"{format_bytes(MOST_CELLS * self.grain)} of symmetric "
                    f"memory; got more. Explore smaller shapes: protocols do not depend on them."
                )
            numbers = self._numbers[words]
        return numbers


class View:
    """One rank's mapping of all ranks' memory."""

    def __init__(self, ranks: int) -> None:
        self.nbytes = ranks * PART_BYTES
        self._fd = os.memfd_create("interlace-testing")
        os.ftruncate(self._fd, self.nbytes)
        self.base = _map(self.nbytes, self._fd)
        self._aliases: list[tuple[int, int, list[int]]] = []
        self._used = 0

    def reset(self) -> None:
        """Forget everything: memory is zero, nothing is allocated."""
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, self.nbytes)
        for base, nbytes, pieces in self._aliases:
            _libc.munmap(base, nbytes * len(pieces))
        self._aliases.clear()
        self._used = 0

    def close(self) -> None:
        self.reset()
        _libc.munmap(self.base, self.nbytes)
        os.close(self._fd)

    def take(self, nbytes: int) -> int:
        """Offset of new memory, the same in every rank's part. Nothing is given back while a
        program runs.
        """
        offset, self._used = self._used, self._used + round_up(max(nbytes, 1), mmap.PAGESIZE)
        if self._used > PART_BYTES:
            raise WorkspaceError(
                f"symmetric memory of an explored rank must fit in {format_bytes(PART_BYTES)}; "
                f"got {format_bytes(self._used)}. "
                f"Explore smaller shapes: protocols do not depend on them."
            )
        return offset

    def alias(self, addresses: Sequence[int], nbytes: int) -> int:
        """Map pieces once more, one behind the other."""
        # A range of addresses, whose pages the pieces replace
        base = _map(len(addresses) * nbytes, self._fd)
        for i, address in enumerate(addresses):
            _map(nbytes, self._fd, base + i * nbytes, address - self.base)
        self._aliases.append((base, nbytes, [address - self.base for address in addresses]))
        return base

    def holds(self, addresses: Addresses) -> npt.NDArray[np.bool_]:
        """Which addresses are of symmetric memory."""
        inside: npt.NDArray[np.bool_] = (addresses - np.uint64(self.base)) < self.nbytes
        for base, nbytes, pieces in self._aliases:
            inside = inside | ((addresses - np.uint64(base)) < nbytes * len(pieces))
        return inside

    def offsets_of(self, addresses: Addresses) -> Offsets:
        """Offsets in the memory of all ranks, which all the addresses are of."""
        offsets: Offsets = (addresses - np.uint64(self.base)).astype(np.int64)
        for base, nbytes, pieces in self._aliases:
            place = addresses - np.uint64(base)
            inside = place < nbytes * len(pieces)
            if inside.any():
                place = np.where(inside, place, 0).astype(np.int64)
                offsets = np.where(
                    inside, np.asarray(pieces, np.int64)[place // nbytes] + place % nbytes, offsets
                )
        return offsets


class ExploredHeap(Heap):
    """Hands out memory of a view."""

    granularity = mmap.PAGESIZE

    def __init__(self, view: View) -> None:
        self.device = torch.device("cpu")
        self.stride = PART_BYTES
        self._view = view

    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        size = pieces * round_up(max(nbytes, 1), self.granularity)
        return Block(
            self._view.base + self._view.take(size), size, self.stride, self.device, lambda: None
        )

    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], None]]:
        return self._view.alias(addresses, nbytes), lambda: None


def element_addresses(tensor: torch.Tensor) -> Addresses:
    """The address of every element, in the order of indices."""
    steps: Any = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = steps[..., None] + np.arange(size, dtype=np.int64) * (
            stride * tensor.element_size()
        )
    addresses: Addresses = (np.uint64(tensor.data_ptr()) + steps.astype(np.uint64)).ravel()
    return addresses
