"""The symmetric memory of calls around a product that need not be made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from interlace.comm.groups.reservation import GPU_GRANULARITY, Reservation
from interlace.errors import ArgumentError
from interlace.gemm import invariance
from interlace.gemm.call import GemmCall
from interlace.gemm.operands import Operands, output_dtype
from interlace.registry import Operator
from interlace.tuning.choice import Choice


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Rank 0 of a group on one node that need not exist; nothing can be exchanged.

    Attributes:
        world_size: The number of ranks, which share memory.
        device: The device; ``meta`` for a GPU that need not be here.
        granularity: Bytes of which every allocation is a multiple.
        rank: This rank.
    """

    world_size: int
    device: torch.device
    granularity: int
    rank: int = 0


def by_implementation(
    operator: Any, operands: Operands, ranks: Ranks, choose: Callable[[int], Choice[Any]]
) -> dict[str, Reservation | None]:
    """Return what each implementation reserves for a call without lists of rows; nothing for rows
    that the ranks do not divide.

    Args:
        operator: The declaration, a ``GemmOperator``.
        operands: Operands of a rank, whose values do not count.
        ranks: The ranks.
        choose: Returns the configurations for so many rows of the product.
    """
    group: Any = ranks
    try:
        rows = operator.plan_rows(operands.rows, (None,) * len(operator.split_names), group)
    except ArgumentError:
        return {}
    choice = choose(rows.product)
    call = GemmCall(
        operator, operands, rows, False, group, "", choice.config, choice.configs, 0, "auto",
        invariance.is_enabled(),
    )  # fmt: skip
    return {
        implementation.name: implementation.reservation(call)
        for implementation in operator.implementations
    }


def on_gpu(
    operator: Operator,
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    world_size: int,
    choice: Choice[Any],
) -> dict[str, Reservation | None]:
    """Return what each implementation reserves on a GPU that need not be here, whose kernels move
    tiles through tensor descriptors; nothing for rows that the ranks do not divide.

    Args:
        rows, columns, inner: M, N and K of one rank's product.
        choice: The configurations of the kernels.
    """
    own_rows = rows // world_size if operator.collective_first else rows
    x = torch.empty(own_rows, inner, dtype=dtype, device="meta")
    operands = Operands(x, x.new_empty(columns, inner), None, None, None, output_dtype(x, None))
    ranks = Ranks(world_size, x.device, GPU_GRANULARITY)
    return by_implementation(operator, operands, ranks, lambda _: choice)
