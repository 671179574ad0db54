"""A vocabulary's weight whose rows are shared out over ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from interlace.comm import Group
from interlace.errors import ArgumentError
from interlace.units import ceil_div


class VocabularyShard(NamedTuple):
    """This rank's columns of the vocabulary.

    Attributes:
        first: The first of them.
        columns: Their number; rows of w behind them are padding.
    """

    first: int
    columns: int

    @staticmethod
    def of(rows: int, vocabulary: int, rank: int, world_size: int) -> VocabularyShard:
        """Return the columns of a rank whose w has so many rows.

        Ranks have equally many, as ``torch.chunk`` shares them out; with more, w is padded.
        """
        first = rank * columns_of_rank(rows, vocabulary, world_size)
        return VocabularyShard(first, max(min(rows, vocabulary - first), 0))


def columns_of_rank(rows: int, vocabulary: int, world_size: int) -> int:
    """Return how many columns each rank has before the next one's begin."""
    return max(rows, ceil_div(vocabulary, world_size))


def agree(
    group: Group, operator: str, shared: Mapping[str, Hashable], rows_of_w: int, rows: int
) -> int:
    """Agree on a call with all ranks, once for all numbers of rows.

    Args:
        group: The ranks.
        operator: Name of the operator.
        shared: What must be equal on all ranks, ``"vocabulary"`` among it.
        rows_of_w: Rows of this rank's weight.
        rows: Rows of the call.

    Returns:
        The call's mark.

    Raises:
        ArgumentError: A rank's weight has fewer rows than its share of the vocabulary, or there is
            no column for a rank.
        RankMismatchError: Ranks differ in what must be the same; raised on every rank.
    """
    group.check()
    vocabulary, ranks = shared["vocabulary"], group.world_size
    assert isinstance(vocabulary, int)
    per_rank = columns_of_rank(rows_of_w, vocabulary, ranks)
    share = max(min(per_rank, vocabulary - group.rank * per_rank), 0)
    columns = VocabularyShard.of(rows_of_w, vocabulary, group.rank, ranks).columns
    compared = {
        **shared,
        "columns_of_a_rank": per_rank,
        "whether_w_has_its_columns": columns == share,
    }
    family = group.agreement.family(operator, compared, {"rows": rows}, "")
    if columns != share:
        raise ArgumentError(
            f"{operator}: w must have {share} rows, this rank's share of vocabulary={vocabulary}, "
            f"or as many on all ranks, some of them padding; got {rows_of_w}."
        )
    if (ranks - 1) * per_rank >= vocabulary:
        raise ArgumentError(
            f"{operator}: vocabulary must have a column for each of {ranks} ranks with {per_rank} "
            f"columns each; got {vocabulary}."
        )
    return family.mark(rows)
