"""What ranks and their kernels must agree on: the columns and samples of every rank, the records of
tables, and the places of signals.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from interlace.units import ceil_div, round_up

MAX_RANKS: Final = 8

# int32 signals of a rank; those after HEADER are of the backward pass.
# Sets take turns by the epoch's parity.
GRANTED: Final = 0  # [set][source]: the rank's buffer may be written; kernels omit the offset 0
DONE: Final = 2 * MAX_RANKS  # [set][source]: all data of the source have arrived
COUNTER: Final = 4 * MAX_RANKS  # number of programs that have finished their remote work; local
TICKETS: Final = 5 * MAX_RANKS  # [set]: tasks that programs have drawn; local
HEADER: Final = 8 * MAX_RANKS

MAX_TABLES: Final = 4096
"""Maximum number of tables per rank.

In the backward pass HEADER is followed by a local counter per table, then by a signal for each
table and source.
"""

# The backward pass's local counters: one of tickets, then two per run from here on. The distance
# puts them in another cache line, as well aligned.
ARRIVALS: Final = 32

TICKET: Final = 4
"""Blocks of runs that a program of the backward pass draws at a time."""

LEFT_ALONE: Final = -16
"""In place of the bytes to a table that the backward pass leaves alone: negative, and a multiple of
16, as kernels say of all places, those that they do not touch included.
"""


class TableRecord(NamedTuple):
    """The numbers of one table that kernels read, int64 on the device.

    Attributes:
        address: Address of the table's first row.
        stride: Elements between two rows.
        width: Elements of a row.
        column: The column of the output at which the table's columns start.
        own_column: The column at which they start among this rank's columns.
        first_key: Rows of the tables before this one. Added to a row's index, it numbers all rows
            of this rank.
        target: Bytes from the call's target (0 in updates) to the table's part that the backward
            pass writes, or :data:`LEFT_ALONE`.
        target_stride: Elements between two rows of that part.
        state: Address of Adagrad's state.
    """

    address: int = 0
    stride: int = 0
    width: int = 1
    column: int = 0
    own_column: int = 0
    first_key: int = 0
    target: int = LEFT_ALONE
    target_stride: int = 0
    state: int = 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """The output of one call, ``[samples of a rank, columns]``.

    Columns are those of rank 0's tables in order, then rank 1's, and so on. Samples are cut into
    equal chunks by rank, the last ones smaller or empty where the ranks do not divide the batch.

    Attributes:
        widths: Width of every table, by rank.
        batch: Samples of all ranks.
    """

    widths: tuple[tuple[int, ...], ...]
    batch: int

    @property
    def world_size(self) -> int:
        return len(self.widths)

    @property
    def chunk(self) -> int:
        """Number of samples per rank; the last ranks may have fewer."""
        return ceil_div(self.batch, self.world_size)

    def samples(self, rank: int) -> int:
        """Return the number of samples that ``rank`` owns."""
        return max(0, min(self.chunk, self.batch - rank * self.chunk))

    @functools.cached_property
    def rank_columns(self) -> tuple[int, ...]:
        """Number of columns of each rank's tables together."""
        return tuple(map(sum, self.widths))

    @property
    def columns(self) -> int:
        """Number of columns of the output."""
        return sum(self.rank_columns)

    def first_column(self, rank: int) -> int:
        """Return the column of the output at which ``rank``'s columns start."""
        return sum(self.rank_columns[:rank])

    def table_columns(self, rank: int) -> list[int]:
        """Return the column, among those of ``rank``, at which each of its tables starts."""
        return [0, *itertools.accumulate(self.widths[rank])][: len(self.widths[rank])]

    @property
    def most_tables(self) -> int:
        """Number of tables of the rank that has most."""
        return max(map(len, self.widths))

    @classmethod
    def of(cls, counts: Sequence[int], widths: Sequence[int], batch: int) -> Layout:
        """Make a layout from each rank's number of tables and the list of all widths.

        Graphs carry layouts in this form.
        """
        return cls(_by_rank(tuple(counts), tuple(widths)), batch)


@functools.lru_cache(maxsize=256)
def _by_rank(counts: tuple[int, ...], widths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    # Graphs hold flat lists of integers only; the ranks' counts cut this one.
    remaining = iter(widths)
    return tuple(tuple(itertools.islice(remaining, count)) for count in counts)


def dense_bounds(rows: Sequence[int], widths: Sequence[int]) -> list[int]:
    """Return the bounds of all tables' dense gradients in one tensor, in elements.

    The first ones are the starts of the gradients, the last one is the end.
    """
    bounds = [0]
    for count, width in zip(rows, widths, strict=True):
        # 64 elements are at least a cache line, so no two gradients share one.
        bounds.append(bounds[-1] + round_up(count * width, 64))
    return bounds


def owners_of(layout: Layout) -> list[list[int]]:
    """Return the numbers that kernels read about every owner, three per row.

    First a row ``[tables, 0, 0]`` per owner; then a row ``[column, column in the landing, width]``
    per owner and table, with rows of zeros up to the most tables of an owner.
    """
    rows = [[len(widths), 0, 0] for widths in layout.widths]
    for owner, widths in enumerate(layout.widths):
        first = layout.first_column(owner)
        rows += [
            [first + column, column, width]
            for column, width in zip(layout.table_columns(owner), widths, strict=True)
        ]
        rows += [[0, 0, 0]] * (layout.most_tables - len(widths))
    return rows


class SizedLookups(NamedTuple):
    """The sizes of a call by which its symmetric memory follows.

    Attributes:
        layout: The columns of all tables and the samples of all ranks.
        itemsize: Bytes of an element of the output, and so of gradients that travel.
        has_backward: Whether there is a backward pass.
    """

    layout: Layout
    itemsize: int
    has_backward: bool
