"""Rows of a matrix that is cut by rank: how many each rank has."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.comm import process_group_named, rank_and_size
from interlace.errors import ArgumentError


def rank_in(group_name: str) -> tuple[int, int]:
    """This process's rank in the group of that name, and the group's size; starts no communication."""
    return rank_and_size(process_group_named(group_name))


def balanced(rows: int, world_size: int) -> list[int]:
    """As ``torch.tensor_split``: the first ``rows % world_size`` ranks have one more. ``rows`` may
    be symbolic.
    """
    return [balanced_rows(rows, rank, world_size) for rank in range(world_size)]


def balanced_rows(rows: int, rank: int, world_size: int) -> int:
    """``balanced(rows, world_size)[rank]``, without a branch on ``rows``."""
    return (rows + world_size - 1 - rank) // world_size


def validate_list(operator: str, name: str, splits: object) -> None:
    """Refuse what is no list of row counts. How many they must be, and their sum, ranks check
    together.

    Raises:
        ArgumentError: not a sequence, or of something else than integers.
    """
    if splits is None:
        return
    if not isinstance(splits, (list, tuple)):
        raise ArgumentError(
            f"{operator}: {name} must be a list of rows, an integer for each rank; got "
            f"{type(splits).__name__}. "
            f"Call .tolist() on a tensor."
        )
    for count in splits:
        if isinstance(count, (float, str, bool)):
            raise ArgumentError(f"{operator}: {name} must hold integers; got {count!r}.")


def check_sum(what: str, splits: Sequence[int], world_size: int, rows: int | None, of: str) -> None:
    """Check a list against the group and, unless ``rows`` is None, against the rows that it shares
    out.

    Raises:
        ArgumentError: a wrong number of entries, a negative one, or a wrong sum.
    """
    if len(splits) != world_size:
        raise ArgumentError(
            f"{what} must have an entry for each of {world_size} ranks; got {list(splits)}."
        )
    if any(count < 0 for count in splits):
        raise ArgumentError(f"{what} must not be negative; got {list(splits)}.")
    if rows is not None and sum(splits) != rows:
        raise ArgumentError(
            f"{what} must sum to {rows}, {of}; got {list(splits)}, which is {sum(splits)}."
        )
