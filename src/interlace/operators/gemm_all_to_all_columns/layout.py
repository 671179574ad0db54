"""The columns of tiles of a product whose columns belong to ranks, and where ranks get them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from interlace.gemm.sequence import ColumnRanges

# An entry of the table that the kernel reads, int64.
FIRST_COLUMN: Final = 0  # of the tiles, in the weight
COUNT: Final = 1  # columns of the tiles that count
TARGETS: Final = 2  # from here on, pairs: a rank that gets them, and the first one's place there
NO_RANK: Final = -1  # of the pairs that there are more of in other entries

_NOWHERE = -1


def columns_of_tiles(column_ranges: ColumnRanges, block_n: int, rank: int) -> list[tuple[int, ...]]:
    """Return the entries of all columns of tiles that any rank gets, in the order in which ``rank``
    computes them: those of different ranks take turns, the neighbour's first. All entries are as
    long.

    Columns that the same ranks get, one behind the other in the weight and in all these ranks'
    results, are cut into tiles together. So each column is computed once.
    """
    ranks, segments = len(column_ranges), segments_of(column_ranges)
    most_owners = max((len(owners) for _, _, owners in segments), default=1)
    by_first_owner: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for first, end, owners in segments:
        for number, column in enumerate(range(first, end, block_n)):
            # Each of several owners is the first one of some of the tiles.
            turned = owners[number % len(owners) :] + owners[: number % len(owners)]
            pairs = [(owner, first_column + column - first) for owner, first_column in turned]
            pairs += [(NO_RANK, 0)] * (most_owners - len(owners))
            entry = (
                column,
                min(block_n, end - column),
                *(number for pair in pairs for number in pair),
            )
            by_first_owner[turned[0][0]].append(entry)
    in_turn = [by_first_owner[(rank + 1 + step) % ranks] for step in range(ranks)]
    longest = max(map(len, in_turn), default=0)
    return [
        entries[number] for number in range(longest) for entries in in_turn if number < len(entries)
    ]


def segments_of(column_ranges: ColumnRanges) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return the ranges of columns that the same ranks get, one behind the other in the weight and
    in all these ranks' results, with these ranks and the place of each range there.
    """
    edges = sorted(
        {edge for ranges in column_ranges for column_range in ranges for edge in column_range}
    )
    segments: list[tuple[int, int, list[tuple[int, int]]]] = []
    for first, end in itertools.pairwise(edges):
        places = [_place(ranges, first) for ranges in column_ranges]
        owners = [
            (owner, first_column)
            for owner, first_column in enumerate(places)
            if first_column != _NOWHERE
        ]
        if not owners:
            continue
        if segments:
            start, stop, before = segments[-1]
            moved = [(owner, column + first - start) for owner, column in before]
            # A key's columns and those of its value, where all of them are the same ranks'.
            if stop == first and owners == moved:
                segments[-1] = start, end, before
                continue
        segments.append((first, end, owners))
    return segments


def _place(ranges_of_rank: Sequence[tuple[int, int]], column: int) -> int:
    """Return where a column is in the result of a rank with these ranges, or ``_NOWHERE``."""
    before = 0
    for first, end in ranges_of_rank:
        if first <= column < end:
            return before + column - first
        before += end - first
    return _NOWHERE
