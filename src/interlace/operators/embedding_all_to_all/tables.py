"""Device-side records of a rank's tables."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.operators.embedding_all_to_all import record
from interlace.operators.embedding_all_to_all.layout import Layout


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
    """Return the record of one table; see ``record`` for the fields."""
    fields = [0] * record.FIELDS
    fields[record.ADDRESS], fields[record.STRIDE], fields[record.WIDTH] = address, stride, width
    fields[record.COLUMN], fields[record.OWN_COLUMN], fields[record.FIRST_KEY] = (
        column,
        own_column,
        first_key,
    )
    fields[record.TARGET], fields[record.TARGET_STRIDE], fields[record.STATE] = (
        target,
        target_stride,
        state,
    )
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
