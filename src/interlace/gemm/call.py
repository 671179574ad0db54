"""Calls of operators around one matrix product, as implementations get them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from interlace.comm import Group, process_group_named
from interlace.comm.groups.symmetric_memory import SymmetricPlace
from interlace.comm.host.agreement import Family
from interlace.gemm.config import GemmConfig
from interlace.gemm.epilogue import Epilogue
from interlace.gemm.operands import Operands
from interlace.tuning.configuration import Configuration

if TYPE_CHECKING:
    from interlace.gemm.operator import GemmOperator


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """The distribution of a call's rows over the ranks, agreed on by all of them.

    Attributes:
        by_rank: Rows that belong to each rank: of the result (reduce-scatter), of x (all-gather),
            or of the sums that it computes (all-reduce). Empty for an all-to-all.
        sent: Rows that go from rank s to rank d, as ``sent[s][d]``, of an all-to-all; else empty.
        result: Rows of this rank's result.
        product: Rows of the product that a choice of implementation goes by, the same on every
            rank.
        total: Rows of all ranks; 0 if there is nothing to compute anywhere.
    """

    by_rank: tuple[int, ...]
    sent: tuple[tuple[int, ...], ...]
    result: int
    product: int
    total: int

    @property
    def is_even(self) -> bool:
        """Return whether every rank gets as many rows from every rank."""
        return len({*self.by_rank, *(rows for counts in self.sent for rows in counts)}) <= 1


@dataclasses.dataclass(frozen=True)
class GemmCall:
    """One call, validated and agreed on by all ranks.

    Attributes:
        operator: The operator's declaration.
        operands: X, w, bias and scales of this rank.
        rows: How rows are shared out.
        gather: Whether the gathered x is a result, too (all-gather only).
        group: The ranks, and what they share.
        group_name: The name of their process group.
        config: The fused kernel's configuration.
        configs: The configurations of implementations that have one of their own, by name.
        mark: The number that this call's signals carry; from the ranks' agreement.
        impl: What the caller has asked for, an implementation or a way to choose one.
        is_batch_invariant: Whether a row's result must have the same bits in every batch.
        leaves: If the bits of a sum over ranks must not depend on their number, the leaves of the
            tree of sums that this rank has (see :func:`interlace.batch_invariant`); else 0.
        epilogue: What is computed of the sum, of operators that have that.
        known: By what ``Group.recall`` finds the call when it comes again; None for nothing.
        form: By what ``Group.recall_form`` finds a call of other operands that is alike; None for
            nothing.
        family: What ranks have agreed on for all numbers of rows, if they have.
        place: Where x lies in symmetric memory, the same on every rank, if peers read it there.
        out: The memory that the caller has for the result; None for new memory.
    """

    operator: GemmOperator
    operands: Operands
    rows: RowPlan
    gather: bool
    group: Group
    group_name: str
    config: GemmConfig
    configs: Mapping[str, Configuration]
    mark: int
    impl: str
    is_batch_invariant: bool = False
    leaves: int = 0
    epilogue: Epilogue | None = None
    known: tuple[Hashable, ...] | None = None
    form: tuple[Hashable, ...] | None = None
    family: Family | None = None
    place: SymmetricPlace | None = None
    out: torch.Tensor | None = None

    @property
    def is_explicit(self) -> bool:
        """Return whether the caller has asked for an implementation by name. Else it may give up,
        and another one runs.
        """
        return self.impl not in self.operator.choosers

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Return the process group; None where this process is on its own."""
        return process_group_named(self.group_name)

    @property
    def known_epilogue(self) -> Epilogue:
        """Return the epilogue of an operator whose calls have one."""
        assert self.epilogue is not None
        return self.epilogue

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the product by which times between nodes are predicted."""
        return self.operands.sizes(self.rows.product)

    def memory(self) -> tuple[Hashable, ...]:
        """Return where the operands lie and what they are, for the key of a replay."""
        return self.gather, self.operands.memory()

    def with_operands(self, operands: Operands) -> GemmCall:
        """Return the same call of other tensors, such as aligned copies."""
        return self if operands is self.operands else dataclasses.replace(self, operands=operands)
