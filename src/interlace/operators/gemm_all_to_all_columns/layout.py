"""The columns of tiles of a product whose columns belong to ranks, and where ranks get them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from interlace.gemm.sequence import ColumnRanges

# An entry of the table that the kernel reads, int64.
FIRST_COLUMN: Final = 0  # of the tiles, in the weight
COUNT: Final = 1  # columns of the tiles that count
PLACES: Final = 2  # of the first of them in each rank's result; -1 for ranks that do not get them

_NOWHERE = -1


def columns_of_tiles(column_ranges: ColumnRanges, block_n: int, rank: int) -> list[tuple[int, ...]]:
    """Return the entries of all columns of tiles that any rank gets, in the order in which ``rank``
    computes them: those of different ranks take turns, the neighbour's first.

    Columns that the same ranks get, one behind the other in the weight and in all these ranks'
    results, are cut into tiles together. So each column is computed once.
    """
    by_first_owner: list[list[tuple[int, ...]]] = [[] for _ in column_ranges]
    for first, end, places in _segments(column_ranges):
        for column in range(first, end, block_n):
            moved = (_NOWHERE if place == _NOWHERE else place + column - first for place in places)
            entry = (column, min(block_n, end - column), *moved)
            owners = [owner for owner, place in enumerate(places) if place != _NOWHERE]
            # Columns of several ranks are counted with one of them, another one for each tile.
            by_first_owner[owners[len(by_first_owner[owners[0]]) % len(owners)]].append(entry)
    ranks = len(column_ranges)
    in_turn = [by_first_owner[(rank + 1 + step) % ranks] for step in range(ranks)]
    longest = max(map(len, in_turn), default=0)
    return [
        entries[number] for number in range(longest) for entries in in_turn if number < len(entries)
    ]


def _segments(column_ranges: ColumnRanges) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the ranges of columns that the same ranks get, and the place of each range in every
    rank's result.
    """
    edges = sorted({edge for ranges in column_ranges for each in ranges for edge in each})
    found = []
    for first, end in itertools.pairwise(edges):
        places = tuple(_place(ranges, first) for ranges in column_ranges)
        if any(place != _NOWHERE for place in places):
            found.append((first, end, places))
    return found


def _place(ranges_of_rank: Sequence[tuple[int, int]], column: int) -> int:
    """Return where a column is in the result of a rank with these ranges, or ``_NOWHERE``."""
    before = 0
    for first, end in ranges_of_rank:
        if first <= column < end:
            return before + column - first
        before += end - first
    return _NOWHERE
