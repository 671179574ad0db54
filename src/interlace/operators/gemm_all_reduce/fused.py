"""The launch of the fused kernel of ``gemm_all_reduce``."""

from __future__ import annotations

import torch

from interlace.comm import Group
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_ranks
from interlace.comm.outputs import BUFFERS
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.launch import (
    constants,
    has_descriptors,
    operand_arguments,
    padded_columns,
    programs,
    slots_for,
    spread_ns,
)
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands
from interlace.gemm.splits import balanced, balanced_tiles

NAME = "gemm_all_reduce"


def run(call: GemmCall) -> torch.Tensor:
    """Return the sum, ``[M, N]``, the same on every rank, by one kernel."""
    operands, group, config, mark = call.operands.for_kernel(), call.group, call.config, call.mark
    dtype = operands.out_dtype
    shape = [operands.rows, padded_columns(operands.columns, dtype)]
    if group.world_size == 1:
        y = operands.x.new_empty(shape, dtype=dtype)
        launch = prepare(group, operands, config, mark, y.data_ptr(), 0, 0)
        with group.running():
            launch()
        return y[:, : operands.columns].contiguous()
    # Peers store sums straight into the result, so it is symmetric memory.
    output = group.outputs.take(shape[0] * shape[1] * dtype.itemsize)
    y = output.tensor(shape, dtype, group.device)
    buffer = output.address, output.buffer_bytes, output.index
    with group.running():
        key = (NAME, config, mark, buffer, operands.memory())
        group.replays.run(key, lambda: prepare(group, operands, config, mark, *buffer)())
    y = y[:, : operands.columns]
    # Memory that is not lent is the landing, which the next call writes again.
    return y.contiguous() if output.lent else y.clone(memory_format=torch.contiguous_format)


def prepare(
    group: Group,
    operands: Operands,
    config: GemmConfig,
    mark: int,
    buffers: int,
    buffer_bytes: int,
    own_buffer: int,
) -> Launch:
    """Return the launch. Collective when the workspace must grow.

    Args:
        mark: The number from the ranks' agreement.
        buffers: The address of rank 0's copy of the first output buffer.
        buffer_bytes: Bytes from one buffer to the next.
        own_buffer: The index of the buffer that this rank's result goes to.
    """
    require(group.backend)
    from interlace.operators.gemm_all_reduce import kernel

    dtype, tiles = operands.out_dtype, has_descriptors(group)
    rows = balanced(operands.rows, group.world_size)
    if tiles:
        # A whole tile at the end of one rank's rows would cover the next rank's; behind the last
        # rank's rows there is nothing.
        rows = balanced_tiles(operands.rows, group.world_size, config.block_m)
    slots = slots_for(group, NAME, rows, operands.columns, dtype, config, tiles)
    stride, results = padded_columns(operands.columns, dtype), None
    if tiles:
        elements = operands.rows * stride
        sizes = [
            (BUFFERS + 1, max(buffer_bytes // dtype.itemsize, elements)),
            (1, elements),
            (operands.rows, stride),
            (operands.columns, 1),
        ]
        results = describe_ranks(group, buffers, dtype, sizes, [config.block_m, config.block_n])
    align = ALIGNMENT_BYTES // dtype.itemsize
    arguments = operand_arguments(operands, config, tiles) | {
        "slots": slots.tiles,
        "results": results,
        "slot_address": slots.workspace.data.address,
        "half_bytes": slots.workspace.half_bytes,
        "outputs": buffers,
        "signals": slots.workspace.signals.address,
        "epochs": slots.workspace.epochs,
        "ctx": group.context(NAME),
        "routes": slots.routes,
        "call": mark,
        "buffer_bytes": buffer_bytes,
        "own_buffer": own_buffer,
        "per_source": slots.per_source,
        "most_rows": max(rows),
        "M": operands.rows,
        "N": operands.columns,
        "K": operands.inner,
        "row_groups": stride // align,
        "spread_ns": spread_ns(config, operands.inner),
    }
    return Launch(
        kernel.gemm_all_reduce,
        (programs(group, config),),
        arguments,
        constants(operands, config, group, descriptors=tiles, tile_stores=tiles),
        (operands,),
    )
