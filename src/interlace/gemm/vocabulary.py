"""A vocabulary's weight whose rows are shared out over ranks: the rules of a product with it, what
ranks must agree on, and what runs it.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from interlace.comm import Group
from interlace.comm.host.agreement import Family
from interlace.errors import ArgumentError
from interlace.gemm.operands import require_bias, require_float, require_kind, require_tensors
from interlace.registry import Implementation, Operator
from interlace.units import ceil_div


class VocabularyShard(NamedTuple):
    """This rank's columns of the vocabulary.

    Attributes:
        first: The first of them.
        columns: Their number; rows of w behind them are padding.
        per_rank: The columns that each rank has before the next one's begin.
    """

    first: int
    columns: int
    per_rank: int

    @staticmethod
    def of(rows: int, vocabulary: int, rank: int, world_size: int) -> VocabularyShard:
        """Return the columns of a rank whose w has so many rows.

        Ranks have equally many, as ``torch.chunk`` shares them out; with more, w is padded.
        """
        per_rank = columns_of_rank(rows, vocabulary, world_size)
        first = rank * per_rank
        return VocabularyShard(first, max(min(rows, vocabulary - first), 0), per_rank)


class VocabularyOperator(Operator):
    """Base of the operators of a product with such a weight: ``"fused"`` where ranks share memory,
    and else ``"unfused"``.
    """

    sizes = ("rows", "hidden", "columns")

    def choose(self, *, nodes: int = 1) -> str:  # type: ignore[override]
        """Return what ``impl="auto"`` runs: the fused kernels where ranks share memory."""
        return "fused" if nodes == 1 else "unfused"

    @abc.abstractmethod
    def described(self, sized: Any, w: torch.Tensor) -> tuple[str, str]:
        """Return a description of a call beside its rows and columns, and why it is fused."""

    def explain(
        self,
        *tensors: Any,
        world_size: int,
        nodes: int = 1,
        lacking: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> tuple[str, str, str]:
        """Return a description of a call, what ``impl="auto"`` runs, and the reason."""
        sized = self.sized(*tensors, world_size=world_size, **options)
        x, w = tensors[:2]
        description, reason = self.described(sized, w)
        name = str(x.dtype).removeprefix("torch.")
        call = f"{self.name} of {sized.rows} rows, {len(w)} columns per rank, {description}, {name}"
        if nodes > 1:
            return call, "unfused", "the ranks do not all share memory"
        if "fused" in lacking:
            return call, "unfused", f"fused needs {lacking['fused']}"
        return call, "fused", reason


def columns_of_rank(rows: int, vocabulary: int, world_size: int) -> int:
    """Return how many columns each rank has before the next one's begin."""
    return max(rows, ceil_div(vocabulary, world_size))


def rows_of(
    operator: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the rows of x, ``[M, H]``, whose kind and shape w and the bias fit.

    Args:
        operator: Name of the operator.
        x, w, bias: What the caller has given for them.

    Raises:
        ArgumentError: x is not ``[..., H]``, w not ``[V/R, H]`` or the bias not ``[V/R]``, or their
            dtypes or devices differ.
    """
    require_tensors(operator, x=x, w=w)
    require_float(f"{operator}: x", x.dtype)
    if not x.dim():
        raise ArgumentError(f"{operator}: x must be [..., H]; got shape {list(x.shape)}.")
    width = x.shape[-1]
    if w.dim() != 2 or w.shape[1] != width:
        raise ArgumentError(
            f"{operator}: w must be [V/R, H] with H = {width}, as in nn.Linear; got shape "
            f"{list(w.shape)}."
        )
    require_kind(f"{operator}: w", w, x.dtype, x.device, "x")
    if bias is not None:
        require_bias(f"{operator}: bias", bias, w, x.dtype, "x", "V/R")
    return x.reshape(x.shape[:-1].numel(), width)


def agree(
    group: Group, operator: str, shared: Mapping[str, Hashable], rows_of_w: int, rows: int
) -> tuple[int, Family | None]:
    """Agree on a call with all ranks, within a node once for all numbers of rows.

    Args:
        group: The ranks.
        operator: Name of the operator.
        shared: What must be equal on all ranks, ``"vocabulary"`` among it.
        rows_of_w: Rows of this rank's weight.
        rows: Rows of the call.

    Returns:
        The call's mark, and the family of calls of all numbers of rows if there is one, for
        ``compare_once`` ahead of a stock collective.

    Raises:
        ArgumentError: A rank's weight has fewer rows than its share of the vocabulary, or there is
            no column for a rank.
        RankMismatchError: Ranks differ in what must be the same; raised on every rank.
    """
    group.check()
    vocabulary, ranks = shared["vocabulary"], group.world_size
    assert isinstance(vocabulary, int)
    first, columns, per_rank = VocabularyShard.of(rows_of_w, vocabulary, group.rank, ranks)
    share = max(min(per_rank, vocabulary - first), 0)
    compared = {
        **shared,
        "columns_of_a_rank": per_rank,
        "whether_w_has_its_columns": columns == share,
    }
    agreed = group.agreement.agree_on_sizes(operator, compared, {"rows": rows}, rows)
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
    return agreed


def choose_implementation(
    operator: Operator, impl: str, group: Group, sized: object
) -> Implementation:
    """Return the implementation that runs a call: ``"unfused"`` where the memory of the one that
    ``"auto"`` stands for does not fit under the group's limit.

    Args:
        impl: The implementation that the caller has named, or ``"auto"``.
        sized: The sizes by which the operator's reservations follow.

    Raises:
        ArgumentError: The implementation was asked for and cannot run such a call.
    """
    operator.require_nodes(impl, group.nodes)
    if impl != "auto":
        return operator.implementation(impl)
    chosen = operator.implementation(operator.choose(nodes=group.nodes))
    lacks = group.shortage(lambda: chosen.reservation(sized))
    return chosen if lacks is None else operator.implementation("unfused")
