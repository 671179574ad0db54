"""From a call to a kernel launch: agreement, which implementation, which configuration, the launch."""

from __future__ import annotations

from typing import Any

import torch

from interlace import tuning
from interlace.comm import Group, process_group_named
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_ranks
from interlace.comm.outputs import BUFFERS
from interlace.gemm.choice import Choice, Decision, choose_product, group_for, resolve
from interlace.gemm.launch import (
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
from interlace.gemm.splits import balanced
from interlace.operators.gemm_all_reduce import reference
from interlace.operators.gemm_all_reduce.config import OPERATOR, GemmAllReduceConfig


def choose(**call: Any) -> Choice[GemmAllReduceConfig]:
    """What ``impl="auto"`` runs; see :func:`interlace.gemm.choice.choose_product`."""
    return choose_product(OPERATOR, GemmAllReduceConfig, **call)


def run(operands: Operands, group_name: str, impl: str, config: str) -> torch.Tensor:
    """Run one call whose arguments ``api`` has validated."""
    group = group_for(OPERATOR, group_name, operands.x.device)
    decision = group.once(
        (OPERATOR, *operands.signature(), impl, config),
        lambda: _decide(operands, group, impl, config),
    )
    if not operands.rows or not operands.columns:
        return operands.x.new_empty([operands.rows, operands.columns], dtype=operands.out_dtype)
    how = decision.how
    if how in tuning.CARRIED:
        y = run_into_output(
            how, "all_reduce", operands, group, process_group_named(group_name), decision.config,
            replace=impl != "auto"
        )  # fmt: skip
        if y is not None:
            return y
        how = decision.otherwise
    if how == "fused":
        return _fused(operands.for_kernel(), group, decision.config, decision.mark)
    group.check()
    return reference.gemm_all_reduce(
        operands.x, operands.w, operands.bias, operands.x_scale, operands.w_scale,
        operands.out_dtype, process_group_named(group_name),
    )  # fmt: skip


def _decide(
    operands: Operands, group: Group, impl: str, config: str
) -> Decision[GemmAllReduceConfig]:
    mark = group.agree(
        OPERATOR,
        the_shape_of_x=tuple(operands.x.shape),
        **operands.agreed(),
        impl=impl,
        config=config,
    )
    operands.require_supported(OPERATOR)
    choice = choose(**operands.sizes(operands.rows), world_size=group.world_size)
    how = resolve(OPERATOR, impl, choice, operands, even=operands.rows % group.world_size == 0)
    return Decision(
        mark, how, choice.otherwise, GemmAllReduceConfig.parse(config) if config else choice.config
    )


def _fused(
    operands: Operands, group: Group, config: GemmAllReduceConfig, mark: int
) -> torch.Tensor:
    """``[M, N]``, the same on every rank, by one kernel."""
    dtype = operands.out_dtype
    shape = [operands.rows, padded_columns(operands.columns, dtype)]
    if group.world_size == 1:
        y = operands.x.new_empty(shape, dtype=dtype)
        launch = prepare(group, operands, config, mark, y.data_ptr(), 0, 0)
        with group.running():
            launch()
        return y[:, : operands.columns].contiguous()
    output = group.outputs.take(shape[0] * shape[1] * dtype.itemsize)
    y = output.tensor(shape, dtype, group.device)
    place = output.address, output.buffer_bytes, output.index
    with group.running():
        key = (OPERATOR, config, mark, place, operands.place())
        group.replays.run(key, lambda: prepare(group, operands, config, mark, *place)())
    y = y[:, : operands.columns]
    return y.contiguous() if output.lent else y.clone(memory_format=torch.contiguous_format)


def prepare(
    group: Group,
    operands: Operands,
    config: GemmAllReduceConfig,
    mark: int,
    buffers: int,
    buffer_bytes: int,
    taken: int,
) -> Launch:
    """The launch, into buffer ``taken`` of those from ``buffers`` on (rank 0's copy). Collective
    when the workspace must grow.
    """
    require(group.backend)
    from interlace.operators.gemm_all_reduce import kernel

    dtype, rows = operands.out_dtype, balanced(operands.rows, group.world_size)
    descriptors = has_descriptors(group)
    # A whole tile at the end of one rank's rows would cover the next one's; beyond the last rank's
    # there is nothing.
    tiles = descriptors and all(count % config.block_m == 0 for count in rows[:-1])
    slots = slots_for(group, OPERATOR, rows, operands.columns, dtype, config, tiles)
    stride, results = padded_columns(operands.columns, dtype), None
    if tiles:
        most = operands.rows * stride
        sizes = [
            (BUFFERS + 1, max(buffer_bytes // dtype.itemsize, most)),
            (1, most),
            (operands.rows, stride),
            (operands.columns, 1),
        ]
        results = describe_ranks(group, buffers, dtype, sizes, [config.block_m, config.block_n])
    align = ALIGNMENT_BYTES // dtype.itemsize
    x, w, bias, x_scale, w_scale, *strides = operand_arguments(operands, config, descriptors)
    arguments = (
        x, w, bias, x_scale, w_scale, slots.tiles, results, slots.workspace.data.address,
        slots.workspace.half_bytes, buffers, slots.workspace.signals.address,
        slots.workspace.epochs, group.context(OPERATOR), slots.routes, mark, buffer_bytes, taken,
        slots.per_source, max(rows), operands.rows, operands.columns, operands.inner, *strides,
        stride // align, spread_ns(config, operands.inner),
    )  # fmt: skip
    constants = options(operands, config, group, descriptors)
    constants |= {"ALIGN": align, "TILES": tiles, "INTERLEAVE": config.interleave}
    return Launch(
        kernel.gemm_all_reduce, (programs(group, config),), arguments, constants, (operands,)
    )
