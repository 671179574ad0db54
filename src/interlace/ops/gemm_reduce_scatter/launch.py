"""From a call to a kernel launch: agreement, which implementation, which configuration, the launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm import Group, process_group_named
from interlace.errors import BackendError
from interlace.ops.gemm_reduce_scatter import reference
from interlace.ops.gemm_reduce_scatter.config import OPERATOR, GemmReduceScatterConfig
from interlace.products.choice import Choice, choose_product, group_for
from interlace.products.operands import Operands
from interlace.products.splits import balanced, check_sum


def choose(**call: Any) -> Choice[GemmReduceScatterConfig]:
    """What ``impl="auto"`` runs; see :func:`interlace.products.choice.choose_product`."""
    choice = choose_product(OPERATOR, GemmReduceScatterConfig, **call)
    return dataclasses.replace(choice, impl="unfused", reason="the fused kernel is not available")


def run(operands: Operands, splits: Sequence[int] | None, group_name: str, impl: str, config: str) -> torch.Tensor:
    """Run one call whose arguments ``api`` has validated."""
    group = group_for(OPERATOR, group_name, operands)
    mark = group.agree(
        OPERATOR,
        the_shape_of_x=tuple(operands.x.shape),
        **operands.agreed(),
        splits=None if splits is None else tuple(splits),
        impl=impl,
        config=config,
    )
    operands.require_supported(OPERATOR)
    if splits is None:
        splits = balanced(operands.rows, group.world_size)
    check_sum(f"{OPERATOR}: splits", splits, group.world_size, operands.rows, "the rows of x")
    if not operands.rows or not operands.columns:
        return operands.x.new_empty([splits[group.rank], operands.columns], dtype=operands.out_dtype)
    choice = choose(**operands.sizes(operands.rows), world_size=group.world_size)
    chosen = GemmReduceScatterConfig.parse(config) if config else choice.config
    if (choice.impl if impl == "auto" else impl) == "fused":
        return _fused(operands.for_kernel(), list(splits), group, chosen, mark)
    group.check()
    return reference.gemm_reduce_scatter(
        operands.x, operands.w, operands.bias, operands.x_scale, operands.w_scale, operands.out_dtype,
        splits, process_group_named(group_name),
    )  # fmt: skip


def _fused(operands: Operands, splits: list[int], group: Group, config: GemmReduceScatterConfig, mark: int) -> torch.Tensor:
    """``[splits[rank], N]`` by one kernel."""
    raise BackendError(f"{OPERATOR}: fused kernel not available. Use impl='unfused' or 'auto'.")
