"""Rows of a matrix that is cut by rank: how many each rank has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm import process_group_named, rank_and_size
from interlace.comm.groups.group import known_group
from interlace.errors import ArgumentError
from interlace.gemm.operands import integer
from interlace.units import ceil_div


def rank_in(group_name: str) -> tuple[int, int]:
    """Return this process's rank in the named group, and the group's size. Nothing is sent."""
    return rank_and_size(process_group_named(group_name))


def ranks_of(group_name: str, device: torch.device) -> int:
    """Return the size of the named group. Before its first call on this device torch is asked,
    which takes the host longer. Nothing is sent.
    """
    process_group = process_group_named(group_name)
    group = known_group(process_group, device)
    return rank_and_size(process_group)[1] if group is None else group.world_size


def balanced(rows: int, world_size: int) -> list[int]:
    """Return the rows of each rank, as evenly as ``torch.tensor_split``: the first ``rows %
    world_size`` ranks have one more. ``rows`` may be symbolic.
    """
    return [balanced_rows(rows, rank, world_size) for rank in range(world_size)]


def balanced_rows(rows: int, rank: int, world_size: int) -> int:
    """Return ``balanced(rows, world_size)[rank]`` without a branch on ``rows``, which may be
    symbolic.
    """
    return (rows + world_size - 1 - rank) // world_size


def balanced_tiles(rows: int, world_size: int, block: int) -> list[int]:
    """Return the rows of each rank if whole tiles of ``block`` rows are dealt out evenly: only the
    last rank that has rows may have a tile that is not full.
    """
    padded = [block * tiles for tiles in balanced(ceil_div(rows, block), world_size)]
    return [min(count, max(rows - sum(padded[:rank]), 0)) for rank, count in enumerate(padded)]


def validated_list(operator: str, name: str, splits: object) -> list[int] | None:
    """Return None, or the integers of a list as Python's, which NumPy's and torch's are not;
    integers of a compiler that traces the call stay what they are.

    The length and the sum are checked later, together with the other ranks.

    Raises:
        ArgumentError: It is no list, or holds something other than integers.
    """
    if splits is None:
        return None
    if not isinstance(splits, (list, tuple)):
        raise ArgumentError(
            f"{operator}: {name} must be a list of rows, an integer for each rank; got "
            f"{type(splits).__name__}. "
            f"Call .tolist() on a tensor."
        )
    return [integer(f"{operator}: {name} must hold integers", count) for count in splits]


def check_sum(
    subject: str, splits: Sequence[int], world_size: int, rows: int | None, of: str
) -> None:
    """Check a list against the group and, unless ``rows`` is None, against the rows that it
    distributes.

    Raises:
        ArgumentError: The number of entries or their sum is wrong, or an entry is negative.
    """
    if len(splits) != world_size:
        raise ArgumentError(
            f"{subject} must have an entry for each of {world_size} ranks; got {list(splits)}."
        )
    if any(count < 0 for count in splits):
        raise ArgumentError(f"{subject} must not be negative; got {list(splits)}.")
    if rows is not None and sum(splits) != rows:
        raise ArgumentError(
            f"{subject} must sum to {rows}, {of}; got {list(splits)}, which is {sum(splits)}."
        )
