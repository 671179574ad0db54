"""From a call to a kernel launch: agreement and splits, which implementation, which configuration, the launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm import Group, process_group_named
from interlace.errors import ArgumentError, BackendError
from interlace.ops.all_gather_gemm import reference
from interlace.ops.all_gather_gemm.config import OPERATOR, AllGatherGemmConfig
from interlace.products.choice import Choice, choose_product, group_for
from interlace.products.operands import Operands
from interlace.products.splits import check_sum


def choose(**call: Any) -> Choice[AllGatherGemmConfig]:
    """What ``impl="auto"`` runs; see :func:`interlace.products.choice.choose_product`. ``rows`` are all ranks'."""
    choice = choose_product(OPERATOR, AllGatherGemmConfig, **call)
    return dataclasses.replace(choice, impl="unfused", reason="the fused kernel is not available")


def run(
    operands: Operands, splits: Sequence[int] | None, gather: bool, group_name: str, impl: str, config: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one call whose arguments ``api`` has validated: the product, and the gathered x or, unless asked for, no rows."""
    group = group_for(OPERATOR, group_name, operands)
    rows = [operands.rows] * group.world_size if splits is None else list(splits)
    mine = rows[group.rank] if group.rank < len(rows) else 0
    mark = group.agree(
        OPERATOR,
        # Compared with the other arguments, so that a rank whose x does not fit its split stops all of them.
        rows_of_x_beyond_their_split=operands.rows - mine,
        splits=tuple(rows),
        **operands.agreed(),
        return_gathered=gather,
        impl=impl,
        config=config,
    )
    operands.require_supported(OPERATOR)
    check_sum(f"{OPERATOR}: splits", rows, group.world_size, None, "")
    if operands.rows != mine:
        raise ArgumentError(
            f"{OPERATOR}: x must have as many rows as splits say, {mine} on rank {group.rank}; got {operands.rows}."
        )
    choice = choose(**operands.sizes(sum(rows)), world_size=group.world_size)
    chosen = AllGatherGemmConfig.parse(config) if config else choice.config
    if operands.columns and sum(rows) and (choice.impl if impl == "auto" else impl) == "fused":
        return _fused(operands.for_kernel(), rows, gather, group, chosen, mark)
    group.check()
    y, gathered = reference.all_gather_gemm(
        operands.x, operands.w, operands.bias, operands.x_scale, operands.w_scale, operands.out_dtype,
        rows, process_group_named(group_name),
    )  # fmt: skip
    if not gather:
        return y, operands.x.new_empty([0, operands.inner])
    return y, gathered.clone() if gathered is operands.x else gathered  # an operator's result is not its argument


def _fused(
    operands: Operands, splits: list[int], gather: bool, group: Group, config: AllGatherGemmConfig, mark: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[M, N]`` by one kernel, and the gathered x ``[M, K]`` if asked for, else ``[0, K]``."""
    raise BackendError(f"{OPERATOR}: fused kernel not available. Use impl='unfused' or 'auto'.")
