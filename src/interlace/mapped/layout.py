"""Padding of matrices, so that the rows of each rank end at a boundary of a mapping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from interlace.comm.replay.memory import Block, call_when_gone
from interlace.errors import ArgumentError
from interlace.units import round_up

BARRIERS = 2
"""Number of barriers that a program has signals for.

At the first one ranks have written, at the second one they have read.
"""


class Mapping:
    """A second mapping of pieces of a block, which it owns with the block while a tensor lives."""

    def __init__(
        self, block: Block, device: torch.device, address: int, release: Callable[[], object]
    ) -> None:
        self.block, self.address = block, address
        call_when_gone(self, device, release)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The part of a rank from one peer: ``sizes`` and ``strides``, and ``nbytes`` with padding."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int


def chunk_of_rows(owner: str, rows: int, columns: int, itemsize: int, granularity: int) -> Chunk:
    """Return a chunk of ``rows``, each padded until all of them fill multiples of ``granularity``.

    Args:
        owner: The function or class that the error message names.
        granularity: Bytes.

    Raises:
        ArgumentError: More than half would be padding.
    """
    stride = stride_of_rows(rows, columns, itemsize, granularity)
    if stride is None:
        raise ArgumentError(
            f"{owner}: {rows} rows of {columns} elements a rank must fill pieces of {granularity} "
            "bytes; more than half would be padding. Give the shape with the ranks in a dimension "
            f"of their own, (world size, {rows}, {columns}): padding then goes between ranks."
        )
    return Chunk((rows, columns), (stride, 1), max(rows, 1) * stride * itemsize)


def stride_of_rows(rows: int, columns: int, itemsize: int, granularity: int) -> int | None:
    """Return the elements from one row to the next with which ``rows`` fill whole multiples of
    ``granularity`` bytes; None if more than half would be padding.
    """
    # The smallest distance of rows, in elements, with which they fill whole pieces.
    unit = granularity // math.gcd(granularity, max(rows, 1) * itemsize)
    stride = round_up(max(columns, 1), unit)
    # A single piece is never refused, since no output takes less.
    is_wasteful = max(rows, 1) * stride > max(granularity // itemsize, 2 * rows * columns)
    return None if is_wasteful else stride


def chunk_of(
    owner: str, sizes: Sequence[int], itemsize: int, ranks: int, granularity: int
) -> Chunk:
    """Return the part of a rank of an output of these sizes, ``(M, N)`` or ``(R, ...)``.

    Raises:
        ArgumentError: More than half would be padding.
    """
    if len(sizes) == 2:
        return chunk_of_rows(owner, sizes[0] // ranks, sizes[1], itemsize, granularity)
    return chunk_of_block(sizes[1:], itemsize, granularity)


def received_pieces(ranks: int) -> int:
    """Return the number of parts that a rank receives: one from each rank, in both halves."""
    return 2 * ranks


def waiting_pieces(ranks: int) -> int:
    """Return the number of parts that wait on a rank until a copy engine takes them away."""
    return ranks - 1


SUM_PIECES = 2
"""Number of tensors in which the sums of all ranks arrive. They take turns, so that a result stays
as it is during the next call.
"""


def chunk_of_block(sizes: Sequence[int], itemsize: int, granularity: int) -> Chunk:
    """Return a chunk that is a contiguous tensor, padded at its end."""
    strides = torch.empty(sizes, device="meta").stride()
    nbytes = round_up(max(math.prod(sizes) * itemsize, 1), granularity)
    return Chunk(tuple(sizes), strides, nbytes)
