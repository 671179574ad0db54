"""A call of ``linear_top_k``: its rules, what all ranks must agree on, and what runs it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.distributed as dist

from interlace.comm import Group, group_named, process_group_named
from interlace.comm.host.agreement import Family
from interlace.comm.replay.replays import places
from interlace.errors import ArgumentError
from interlace.gemm.operands import integer
from interlace.gemm.vocabulary import VocabularyShard, agree, choose_implementation
from interlace.registry import Implementation, operator_named

OPERATOR = "linear_top_k"
MAX_RANKS = 8
MOST_CHOSEN = 64
MOST_COLUMNS = 1 << 24
"""Columns that a float32 tells apart, as which they travel."""


class SizedChoice(NamedTuple):
    """The sizes of a call by which its symmetric memory follows.

    Attributes:
        rows: Rows of x.
        k: Columns that are chosen in each.
        world_size: Number of ranks.
    """

    rows: int
    k: int
    world_size: int


def validated_numbers(k: object, vocabulary: object) -> tuple[int, int]:
    """Return both numbers as Python's.

    Raises:
        ArgumentError: No rank could choose so many columns; see :func:`interlace.linear_top_k`.
    """
    rule_of_k = f"{OPERATOR}: k must be 1 to {MOST_CHOSEN}"
    chosen = integer(rule_of_k, k)
    if not 1 <= chosen <= MOST_CHOSEN:
        raise ArgumentError(f"{rule_of_k}; got {chosen}.")
    rule_of_columns = f"{OPERATOR}: vocabulary must be 1 to {MOST_COLUMNS}"
    columns = integer(rule_of_columns, vocabulary)
    if not 1 <= columns <= MOST_COLUMNS:
        raise ArgumentError(f"{rule_of_columns}; got {columns}.")
    return chosen, columns


def require_columns(k: int, fewest: int) -> None:
    """Refuse to choose more columns than the rank with the fewest has.

    Raises:
        ArgumentError: It has not so many.
    """
    if k > fewest:
        raise ArgumentError(
            f"{OPERATOR}: k must be at most the columns of each rank, {fewest}; got {k}."
        )


def known_call(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, k: int, vocabulary: int, impl: str
) -> tuple[tuple[Hashable, ...], Hashable]:
    """Return what calls that differ in addresses alone have in common, for ``Group.recall_form``,
    and the addresses; both are for ``Group.recall``.

    What ranks have agreed on for such calls stays until they forget it together.
    """
    addresses, *kinds = zip(*places(x, w, x[:0] if bias is None else bias), strict=True)
    return (OPERATOR, impl, k, vocabulary, bias is None, *kinds), addresses


@dataclasses.dataclass(eq=False)
class TopKCall:
    """One call whose shapes and devices are validated; implementations get it agreed on.

    Attributes:
        x, w, bias, k, vocabulary: Those of :func:`interlace.linear_top_k`; x is ``[M, H]``.
        group_name: The name of the ranks' process group.
        impl: The implementation that the caller has named, or what chooses one.
        mark: The number that this call's words carry; 0 until :meth:`agree`.
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    k: int
    vocabulary: int
    group_name: str
    impl: str
    mark: int = dataclasses.field(default=0, init=False)

    @functools.cached_property
    def group(self) -> Group:
        return group_named(self.group_name, self.x.device)

    @property
    def known(self) -> tuple[tuple[Hashable, ...], Hashable] | None:
        """What :func:`known_call` says of it; None where no call is remembered."""
        if not self.group.replays.is_enabled:
            return None
        return known_call(self.x, self.w, self.bias, self.k, self.vocabulary, self.impl)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group, for collectives of torch."""
        return process_group_named(self.group_name)

    @functools.cached_property
    def shard(self) -> VocabularyShard:
        """This rank's columns of the vocabulary."""
        group = self.group
        return VocabularyShard.of(len(self.w), self.vocabulary, group.rank, group.world_size)

    def agree(self) -> Family | None:
        """Agree on this call with all ranks, within a node once for all numbers of rows, which
        gives it its mark; see :func:`interlace.gemm.vocabulary.agree`.

        Returns:
            The family of calls of all numbers of rows, if there is one.

        Raises:
            ArgumentError: A rank has fewer columns than are chosen.
        """
        group = self.group
        group.require_size(OPERATOR, MAX_RANKS)
        shared = {
            "vocabulary": self.vocabulary,
            "the_width_of_x": self.x.shape[1],
            "k": self.k,
            "dtype": str(self.x.dtype),
            "whether_there_is_a_bias": self.bias is not None,
            "impl": self.impl,
        }
        self.mark, family = agree(group, OPERATOR, shared, len(self.w), len(self.x))
        per_rank = self.shard.per_rank
        fewest = min(per_rank, self.vocabulary - (group.world_size - 1) * per_rank)
        require_columns(self.k, fewest)
        return family

    @functools.cached_property
    def implementation(self) -> Implementation:
        """The implementation that runs this call.

        Raises:
            ArgumentError: The implementation was asked for and cannot run such a call.
        """
        sized = SizedChoice(len(self.x), self.k, self.group.world_size)
        return choose_implementation(operator_named(OPERATOR), self.impl, self.group, sized)
