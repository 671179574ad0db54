"""Records of tables and the layout of signals: numbers that host and device must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from interlace.operators.embedding_all_to_all.layout import Layout

# One record per table, int64 [tables, FIELDS] on the device.
ADDRESS: Final = 0  # address of the table's first row
STRIDE: Final = 1  # elements between two rows
WIDTH: Final = 2
COLUMN: Final = 3  # the column of the output at which the table's columns start
OWN_COLUMN: Final = 4  # the column at which they start among this rank's columns
# Rows of the tables before this one. Added to a row's index, it numbers all rows of this rank.
FIRST_KEY: Final = 5
# Bytes from the call's target (0 in updates) to the table's part that the backward pass writes; -1
# if the table is left alone.
TARGET: Final = 6
TARGET_STRIDE: Final = 7
STATE: Final = 8  # address of Adagrad's state
FIELDS: Final = 9

MAX_RANKS: Final = 8

# int32 signals of a rank, the same in all protocols; those after HEADER depend on the protocol.
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


def entry(
    *,
    width: int,
    column: int,
    own_column: int,
    address: int = 0,
    stride: int = 0,
    first_key: int = 0,
    target: int = -1,
    target_stride: int = 0,
    state: int = 0,
) -> tuple[int, ...]:
    """Return the record of one table."""
    fields = [0] * FIELDS
    fields[ADDRESS], fields[STRIDE], fields[WIDTH] = address, stride, width
    fields[COLUMN], fields[OWN_COLUMN], fields[FIRST_KEY] = column, own_column, first_key
    fields[TARGET], fields[TARGET_STRIDE], fields[STATE] = target, target_stride, state
    return tuple(fields)


def alignment(numbers: Sequence[int], itemsize: int) -> int:
    """Return the largest power of two, up to 16 bytes, that divides ``numbers`` of elements."""
    align = 16 // itemsize
    while align > 1 and any(number % align for number in numbers):
        align //= 2
    return align


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
