"""Symmetric memory of several ranks in one process: a view of all ranks' memory for each rank.

A view is private to its rank and exists so that host operations have real memory to load from. The
machine holds the true contents at any time; a view is brought up to date only where its rank loads.
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

from interlace.comm.groups.memory_cpu import map_file, unmap
from interlace.comm.replay.memory import Block, Heap
from interlace.errors import WorkspaceError
from interlace.units import MIB, format_bytes, round_up
from interlace_explorer.operations import Cells

PART_BYTES = 64 * MIB
"""Size of one rank's symmetric memory. Pages that are not touched take no memory."""

MOST_CELLS = 1 << 18
"""Most cells that a program may touch, of all ranks together."""

Addresses = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]


class FinerGrain(BaseException):
    """A value is smaller than the cells of simulated memory.

    It is a ``BaseException``, because Triton's interpreter wraps every ``Exception``.

    Attributes:
        grain: A size of cells that fits, in bytes.
    """

    def __init__(self, grain: int) -> None:
        super().__init__(grain)
        self.grain = grain


class CellTable:
    """Numbers of the cells of all ranks' memory, in the order in which they were first touched.

    Numbering only touched cells keeps the machine's arrays, which every schedule copies, small.

    Attributes:
        grain: Size of a cell, in bytes.
        count: Number of cells so far; number 0 is no cell.
    """

    def __init__(self, ranks: int, grain: int) -> None:
        self.grain = grain
        self.count = 0
        self._numbers = np.zeros(ranks * PART_BYTES // grain, np.intp)

    def cells_at(self, offsets: Offsets, itemsize: int) -> Cells:
        """Return the cells of elements of ``itemsize`` bytes at these offsets.

        Raises:
            FinerGrain: the elements are smaller than cells, or not aligned to them.
            WorkspaceError: the program touches too much memory.
        """
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
    """One rank's mapping of all ranks' memory.

    Attributes:
        nbytes: Size of all ranks' memory.
        base: Its address.
    """

    def __init__(self, ranks: int) -> None:
        self.nbytes = ranks * PART_BYTES
        self._fd = os.memfd_create("interlace-testing")
        os.ftruncate(self._fd, self.nbytes)
        self.base = map_file(self.nbytes, self._fd)
        self._aliases: list[tuple[int, int, list[int]]] = []
        self._blocks: list[Block] = []
        self._used = 0

    def reset(self) -> None:
        """Set the memory to zero, with nothing allocated."""
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, self.nbytes)
        for base, nbytes, pieces in self._aliases:
            unmap(base, nbytes * len(pieces))
        self._aliases.clear()
        # A program may keep its tensors longer than the run. The same addresses belong to the next
        # run's tensors, or to nobody.
        for block in self._blocks:
            block.withdraw()
        self._blocks.clear()
        self._used = 0

    def close(self) -> None:
        """Unmap the memory."""
        self.reset()
        unmap(self.base, self.nbytes)
        os.close(self._fd)

    def allocate(self, nbytes: int, device: torch.device) -> Block:
        """Allocate memory at the same offset of every rank's part.

        Memory is not freed while a program runs.

        Raises:
            WorkspaceError: the program needs more than ``PART_BYTES``.
        """
        # A page that is nobody's, so that a kernel which runs past the end does not reach the next.
        offset = self._used + mmap.PAGESIZE
        self._used = offset + round_up(max(nbytes, 1), mmap.PAGESIZE)
        if self._used > PART_BYTES:
            raise WorkspaceError(
                f"symmetric memory of an explored rank must fit in {format_bytes(PART_BYTES)}; "
                f"got {format_bytes(self._used)}. "
                f"Explore smaller shapes: protocols do not depend on them."
            )
        block = Block(
            self.base + offset, nbytes, PART_BYTES, self.nbytes // PART_BYTES, device, lambda: None
        )
        self._blocks.append(block)
        return block

    def alias(self, addresses: Sequence[int], nbytes: int) -> int:
        """Map pieces of ``nbytes`` once more, one behind the other; return the first address."""
        # Reserves a range of addresses, whose pages the pieces then replace.
        base = map_file(len(addresses) * nbytes, self._fd)
        for i, address in enumerate(addresses):
            map_file(nbytes, self._fd, base + i * nbytes, address - self.base)
        self._aliases.append((base, nbytes, [address - self.base for address in addresses]))
        return base

    def holds(self, addresses: Addresses) -> npt.NDArray[np.bool_]:
        """Tell, for every address, if it is of symmetric memory (bool array)."""
        inside: npt.NDArray[np.bool_] = (addresses - np.uint64(self.base)) < self.nbytes
        for base, nbytes, pieces in self._aliases:
            inside = inside | ((addresses - np.uint64(base)) < nbytes * len(pieces))
        return inside

    def offsets_of(self, addresses: Addresses) -> Offsets:
        """Return the offsets of addresses of symmetric memory in the memory of all ranks."""
        offsets: Offsets = (addresses - np.uint64(self.base)).astype(np.int64)
        for base, nbytes, pieces in self._aliases:
            distance = addresses - np.uint64(base)
            inside = distance < nbytes * len(pieces)
            if inside.any():
                distance = np.where(inside, distance, 0).astype(np.int64)
                aliased = np.asarray(pieces, np.int64)[distance // nbytes] + distance % nbytes
                offsets = np.where(inside, aliased, offsets)
        return offsets


class ExploredHeap(Heap):
    """A heap that hands out memory of a view."""

    granularity = mmap.PAGESIZE

    def __init__(self, view: View) -> None:
        self.device = torch.device("cpu")
        self.stride = PART_BYTES
        self._view = view

    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        """Allocate pieces of ``nbytes``, each of whole pages."""
        size = pieces * round_up(max(nbytes, 1), self.granularity)
        return self._view.allocate(size, self.device)

    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], None]]:
        """Map pieces once more, one behind the other; return the address, and how to undo it."""
        return self._view.alias(addresses, nbytes), lambda: None


def element_addresses(tensor: torch.Tensor) -> Addresses:
    """Return the address of every element of a tensor, in the order of indices (uint64)."""
    steps: Any = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = steps[..., None] + np.arange(size, dtype=np.int64) * (
            stride * tensor.element_size()
        )
    addresses: Addresses = (np.uint64(tensor.data_ptr()) + steps.astype(np.uint64)).ravel()
    return addresses


def process_memory(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return a view of memory of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
