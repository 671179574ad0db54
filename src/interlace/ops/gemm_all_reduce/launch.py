"""From a call to a kernel launch: agreement, which implementation, which configuration, the launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from interlace.comm import Group, process_group_named
from interlace.errors import BackendError
from interlace.ops.gemm_all_reduce import reference
from interlace.ops.gemm_all_reduce.config import OPERATOR, GemmAllReduceConfig
from interlace.products.choice import Choice, choose_product, group_for
from interlace.products.operands import Operands


def choose(**call: Any) -> Choice[GemmAllReduceConfig]:
    """What ``impl="auto"`` runs; see :func:`interlace.products.choice.choose_product`."""
    choice = choose_product(OPERATOR, GemmAllReduceConfig, **call)
    return dataclasses.replace(choice, impl="unfused", reason="the fused kernel is not available")


def run(operands: Operands, group_name: str, impl: str, config: str) -> torch.Tensor:
    """Run one call whose arguments ``api`` has validated."""
    group = group_for(OPERATOR, group_name, operands)
    mark = group.agree(OPERATOR, the_shape_of_x=tuple(operands.x.shape), **operands.agreed(), impl=impl, config=config)
    operands.require_supported(OPERATOR)
    if not operands.rows or not operands.columns:
        return operands.x.new_empty([operands.rows, operands.columns], dtype=operands.out_dtype)
    choice = choose(**operands.sizes(operands.rows), world_size=group.world_size)
    chosen = GemmAllReduceConfig.parse(config) if config else choice.config
    if (choice.impl if impl == "auto" else impl) == "fused":
        return _fused(operands.for_kernel(), group, chosen, mark)
    group.check()
    return reference.gemm_all_reduce(
        operands.x, operands.w, operands.bias, operands.x_scale, operands.w_scale, operands.out_dtype,
        process_group_named(group_name),
    )  # fmt: skip


def _fused(operands: Operands, group: Group, config: GemmAllReduceConfig, mark: int) -> torch.Tensor:
    """``[M, N]``, the same on every rank, by one kernel."""
    raise BackendError(f"{OPERATOR}: fused kernel not available. Use impl='unfused' or 'auto'.")
