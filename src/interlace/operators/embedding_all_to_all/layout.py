"""The columns and samples of every rank, which all ranks of a call know."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from interlace.units import ceil_div, round_up


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
