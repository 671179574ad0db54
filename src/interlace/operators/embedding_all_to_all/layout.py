"""Who holds which columns and which samples: what every rank of a call knows of all the others."""

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
        widths: of every table, by rank.
        batch: samples of all ranks.
    """

    widths: tuple[tuple[int, ...], ...]
    batch: int

    @property
    def world_size(self) -> int:
        return len(self.widths)

    @property
    def chunk(self) -> int:
        """Samples of a rank; the last ranks may have fewer."""
        return ceil_div(self.batch, self.world_size)

    def samples(self, rank: int) -> int:
        """Samples that ``rank`` owns."""
        return max(0, min(self.chunk, self.batch - rank * self.chunk))

    @functools.cached_property
    def rank_columns(self) -> tuple[int, ...]:
        """Columns of each rank's tables together."""
        return tuple(map(sum, self.widths))

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return sum(self.rank_columns)

    def first_column(self, rank: int) -> int:
        """Where ``rank``'s columns start in the output."""
        return sum(self.rank_columns[:rank])

    def table_columns(self, rank: int) -> list[int]:
        """Where each of ``rank``'s tables starts within that rank's columns."""
        return [0, *itertools.accumulate(self.widths[rank])][: len(self.widths[rank])]

    @property
    def most_tables(self) -> int:
        """Tables of the rank that has most."""
        return max(map(len, self.widths))

    @classmethod
    def of(cls, counts: Sequence[int], widths: Sequence[int], batch: int) -> Layout:
        """From each rank's number of tables and all widths in one list: how operators carry it
        through graphs.
        """
        return cls(_by_rank(tuple(counts), tuple(widths)), batch)


@functools.lru_cache(maxsize=256)
def _by_rank(counts: tuple[int, ...], widths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    rest = iter(widths)
    return tuple(tuple(itertools.islice(rest, count)) for count in counts)


def dense_places(rows: Sequence[int], widths: Sequence[int]) -> list[int]:
    """Where each table's dense gradient begins in one tensor of all, in elements, and where the
    last one ends.
    """
    places = [0]
    for count, width in zip(rows, widths, strict=True):
        places.append(places[-1] + round_up(count * width, 64))
    return places
