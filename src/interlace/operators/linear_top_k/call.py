"""A call of ``linear_top_k``: its rules, what all ranks must agree on, and what runs it."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

from interlace.comm import Group, group_named, process_group_named
from interlace.errors import ArgumentError
from interlace.gemm.operands import require_device, require_float, require_tensor
from interlace.gemm.vocabulary import VocabularyShard, agree, columns_of_rank
from interlace.registry import Implementation, Operator, operator_named

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


def validate(
    x: torch.Tensor, w: torch.Tensor, k: int, bias: torch.Tensor | None, vocabulary: int
) -> None:
    """Refuse arguments that no rank could compute with; see :func:`interlace.linear_top_k`."""
    for name, tensor in (("x", x), ("w", w)):
        require_tensor(f"{OPERATOR}: {name}", tensor)
    require_float(f"{OPERATOR}: x", x.dtype)
    if x.dim() != 2:
        raise ArgumentError(f"{OPERATOR}: x must be [..., H]; got shape {list(x.shape)}.")
    if w.dim() != 2 or w.shape[1] != x.shape[1]:
        raise ArgumentError(
            f"{OPERATOR}: w must be [V/R, H] with H = {x.shape[1]}, as in nn.Linear; got shape "
            f"{list(w.shape)}."
        )
    for name, other in (("w", w), ("bias", bias)):
        if other is not None:
            require_device(f"{OPERATOR}: {name}", other, "x", x.device)
            if other.dtype != x.dtype:
                raise ArgumentError(
                    f"{OPERATOR}: {name} must be {x.dtype}, like x; got {other.dtype}."
                )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ArgumentError(
            f"{OPERATOR}: bias must be [{len(w)}], a number for each row of w; got shape "
            f"{list(bias.shape)}."
        )
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST_CHOSEN:
        raise ArgumentError(f"{OPERATOR}: k must be 1 to {MOST_CHOSEN}; got {k!r}.")
    if not 1 <= vocabulary <= MOST_COLUMNS:
        raise ArgumentError(
            f"{OPERATOR}: vocabulary must be 1 to {MOST_COLUMNS}; got {vocabulary}."
        )


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
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group, for collectives of torch."""
        return process_group_named(self.group_name)

    @property
    def columns_of_a_rank(self) -> int:
        """The columns that each rank has before the next one's begin."""
        return columns_of_rank(len(self.w), self.vocabulary, self.group.world_size)

    @functools.cached_property
    def shard(self) -> VocabularyShard:
        """This rank's columns of the vocabulary."""
        group = self.group
        return VocabularyShard.of(len(self.w), self.vocabulary, group.rank, group.world_size)

    def agree(self) -> None:
        """Agree on this call with all ranks, once for all numbers of rows, which gives it its mark.

        Raises:
            ArgumentError: A rank has fewer columns than are chosen.
        """
        self.group.require_size(OPERATOR, MAX_RANKS)
        shared = {
            "vocabulary": self.vocabulary,
            "the_width_of_x": self.x.shape[1],
            "k": self.k,
            "dtype": str(self.x.dtype),
            "whether_there_is_a_bias": self.bias is not None,
            "impl": self.impl,
        }
        self.mark = agree(self.group, OPERATOR, shared, len(self.w), len(self.x))
        last = self.vocabulary - (self.group.world_size - 1) * self.columns_of_a_rank
        if self.k > min(self.columns_of_a_rank, last):
            raise ArgumentError(
                f"{OPERATOR}: k must be at most the columns of each rank, "
                f"{min(self.columns_of_a_rank, last)}; got {self.k}."
            )

    @functools.cached_property
    def implementation(self) -> Implementation:
        """The implementation that runs this call.

        Raises:
            ArgumentError: The implementation was asked for and cannot run such a call.
        """
        group, operator = self.group, declaration()
        operator.require_nodes(self.impl, group.nodes)
        if self.impl != "auto":
            return operator.implementation(self.impl)
        chosen = operator.implementation(operator.choose(nodes=group.nodes))
        if group.spans_nodes or group.memory.limit_bytes is None:
            return chosen
        sized = SizedChoice(len(self.x), self.k, group.world_size)
        lacks = group.memory.shortage(chosen.reservation(sized))
        return chosen if lacks is None else operator.implementation("unfused")


def declaration() -> Operator:
    """Return the operator's declaration."""
    return operator_named(OPERATOR)
