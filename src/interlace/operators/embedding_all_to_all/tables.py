"""Device-side records of a rank's tables."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.operators.embedding_all_to_all import record


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
    """The record of one table; see ``record`` for the fields."""
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
    """Elements, a power of two of at most 16 bytes, that every one of ``numbers`` (in elements) is
    a multiple of.
    """
    align = 16 // itemsize
    while align > 1 and any(number % align for number in numbers):
        align //= 2
    return align
