"""From a call to a kernel launch: agreement, which implementation, which configuration, the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace import tuning
from interlace.comm import Group, process_group_named
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch
from interlace.comm.replays import places
from interlace.gemm.choice import Choice, Decision, choose_product, group_for, resolve
from interlace.gemm.launch import (
    describe_own,
    has_descriptors,
    operand_arguments,
    options,
    padded_columns,
    programs,
    slots_for,
    spread_ns,
)
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands
from interlace.gemm.outputs import run_into_output
from interlace.gemm.splits import balanced, check_sum
from interlace.operators.gemm_reduce_scatter import reference, split
from interlace.operators.gemm_reduce_scatter.config import OPERATOR, GemmReduceScatterConfig


def choose(**call: Any) -> Choice[GemmReduceScatterConfig]:
    """What ``impl="auto"`` runs; see :func:`interlace.gemm.choice.choose_product`."""
    return choose_product(OPERATOR, GemmReduceScatterConfig, **call)


def run(
    operands: Operands, splits: Sequence[int] | None, group_name: str, impl: str, config: str
) -> torch.Tensor:
    """Run one call whose arguments ``api`` has validated."""
    group = group_for(OPERATOR, group_name, operands.x.device)
    key = (OPERATOR, *operands.signature(), None if splits is None else tuple(splits), impl, config)
    decision = group.once(key, lambda: _decide(operands, splits, group, impl, config))
    rows, how, chosen, mark = decision.rows, decision.how, decision.config, decision.mark
    if not operands.rows or not operands.columns:
        return operands.x.new_empty([rows[group.rank], operands.columns], dtype=operands.out_dtype)
    if how == "chunked":
        return split.run([operands], rows, group, chosen, mark)
    if how in tuning.CARRIED:
        y = run_into_output(
            how, "reduce_scatter", operands, group, process_group_named(group_name), chosen,
            replace=impl != "auto"
        )  # fmt: skip
        if y is not None:
            return y
        how = decision.otherwise
    if how == "fused":
        return _fused(operands.for_kernel(), rows, group, chosen, mark)
    group.check()
    return reference.gemm_reduce_scatter(
        operands.x, operands.w, operands.bias, operands.x_scale, operands.w_scale,
        operands.out_dtype, rows, process_group_named(group_name),
    )  # fmt: skip


def _decide(
    operands: Operands, splits: Sequence[int] | None, group: Group, impl: str, config: str
) -> Decision[GemmReduceScatterConfig]:  # fmt: skip
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
    choice = choose(**operands.sizes(operands.rows), world_size=group.world_size)
    how = resolve(OPERATOR, impl, choice, operands, even=len(set(splits)) == 1)
    chosen = GemmReduceScatterConfig.parse(config) if config else choice.config
    return Decision(mark, how, choice.otherwise, chosen, tuple(splits))


def run_sum(products: Sequence[Operands], group_name: str) -> torch.Tensor:
    """Run one call for the sum of several products, in parts."""
    first = products[0]
    group = group_for(OPERATOR, group_name, first.x.device)
    key = (f"{OPERATOR}, sum", *(each.signature() for each in products))
    decision = group.once(key, lambda: _decide_sum(products, group))
    if not first.rows or not first.columns:
        return first.x.new_empty([decision.rows[group.rank], first.columns])
    return split.run(products, decision.rows, group, decision.config, decision.mark)


def _decide_sum(products: Sequence[Operands], group: Group) -> Decision[GemmReduceScatterConfig]:
    first, ranks = products[0], group.world_size
    mark = group.agree(
        f"{OPERATOR}, sum",
        products=tuple((tuple(each.x.shape), *each.agreed().items()) for each in products),
    )
    choice = choose(
        **first.sizes(first.rows) | {"inner": sum(each.inner for each in products)},
        world_size=ranks,
    )
    return Decision(
        mark, "chunked", choice.otherwise, choice.config, tuple(balanced(first.rows, ranks))
    )


def _fused(
    operands: Operands,
    splits: Sequence[int],
    group: Group,
    config: GemmReduceScatterConfig,
    mark: int,
) -> torch.Tensor:
    """``[splits[rank], N]`` by one kernel."""
    stride = padded_columns(operands.columns, operands.out_dtype)
    y = operands.x.new_empty([splits[group.rank], stride], dtype=operands.out_dtype)
    with group.running():
        key = (OPERATOR, config, mark, tuple(splits), places(y), operands.place())
        group.replays.run(key, lambda: prepare(group, operands, splits, y, config, mark)())
    return y[:, : operands.columns].contiguous()


def prepare(
    group: Group, operands: Operands, splits: Sequence[int], y: torch.Tensor,
    config: GemmReduceScatterConfig, mark: int = 0, *, tile_stores: bool = True,
) -> Launch:  # fmt: skip
    """The launch; ``y`` is ``[splits[rank], padded columns]``. Collective when the workspace must
    grow.

    Args:
        tile_stores: let tiles travel by copies out of shared memory where the GPU has them; else by
            ordinary stores.
    """
    require(group.backend)
    from interlace.operators.gemm_reduce_scatter import kernel

    dtype = operands.out_dtype
    descriptors = has_descriptors(group)
    tiles = descriptors and tile_stores
    slots = slots_for(group, OPERATOR, splits, operands.columns, dtype, config, tiles)
    results = describe_own(y, operands.columns, [config.block_m, config.block_n]) if tiles else None
    align = ALIGNMENT_BYTES // dtype.itemsize
    x, w, bias, x_scale, w_scale, *strides = operand_arguments(operands, config, descriptors)
    arguments = (
        x, w, bias, x_scale, w_scale, slots.tiles, results, slots.workspace.data.address,
        slots.workspace.half_bytes, y.data_ptr(), slots.workspace.signals.address,
        slots.workspace.epochs, group.context(OPERATOR), slots.routes, mark, slots.per_source,
        max(splits), operands.columns, operands.inner, *strides, y.stride(0) // align,
        spread_ns(config, operands.inner),
    )  # fmt: skip
    constants = options(operands, config, group, descriptors)
    constants |= {"ALIGN": align, "TILES": tiles, "INTERLEAVE": config.interleave}
    return Launch(
        kernel.gemm_reduce_scatter, (programs(group, config),), arguments, constants, (operands, y)
    )
