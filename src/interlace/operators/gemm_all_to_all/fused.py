"""The launch of the fused kernel of ``gemm_all_to_all``, of one product or of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from interlace.comm import Group
from interlace.comm.constants import on_device
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_ranks
from interlace.comm.outputs import BUFFERS
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.kernels import layout
from interlace.gemm.launch import (
    constants,
    has_descriptors,
    operand_arguments,
    padded_columns,
    programs,
    spread_ns,
)
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands
from interlace.units import ceil_div

NAME = "gemm_all_to_all"

Sent = Sequence[Sequence[int]]
"""``sent[s][d]``: rows that go from rank s to rank d; of a batch, of each product."""


def run(call: GemmCall) -> torch.Tensor:
    """Return the rows for this rank, ``[rows, N]``, by one kernel."""
    operands = call.operands.for_kernel()
    return multiply_and_send(operands, call.rows.sent, call.group, call.config, call.mark)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Products whose operands lie one behind the other.

    Attributes:
        count: The number of products.
        rows, columns: M and N of each product.
    """

    count: int
    rows: int
    columns: int


def multiply_and_send(
    operands: Operands,
    sent: Sent,
    group: Group,
    config: GemmConfig,
    mark: int,
    batch: Batch | None = None,
) -> torch.Tensor:
    """Return ``[rows for this rank, N]``, computed by one kernel.

    Args:
        operands: As :meth:`Operands.for_kernel` returns them.
        batch: What the operands consist of; default: one product.
    """
    batch = batch or Batch(1, operands.rows, operands.columns)
    columns = batch.columns
    rows = batch.count * sum(counts[group.rank] for counts in sent)
    stride = padded_columns(columns, operands.out_dtype)
    if group.world_size == 1:
        y = operands.x.new_empty([rows, stride], dtype=operands.out_dtype)
        launch = prepare(group, operands, sent, config, mark, y.data_ptr(), 0, 0, batch=batch)
        with group.running():
            launch()
        return y[:, :columns].contiguous()
    # Every rank's buffer has room for the rank that receives most.
    received = (sum(counts[rank] for counts in sent) for rank in range(group.world_size))
    nbytes = batch.count * max(received) * stride * operands.out_dtype.itemsize
    # Peers store tiles straight into the result, so it is symmetric memory.
    output = group.outputs.take(nbytes)
    y = output.tensor([rows, stride], operands.out_dtype, group.device)
    buffer = output.address, output.buffer_bytes, output.index
    with group.running():
        key = (NAME, config, mark, tuple(map(tuple, sent)), batch, buffer, operands.memory())
        group.replays.run(
            key,
            lambda: prepare(group, operands, sent, config, mark, *buffer, batch=batch)(),
        )
    y = y[:, :columns]
    # Memory that is not lent is the landing, which the next call writes again.
    return y.contiguous() if output.lent else y.clone(memory_format=torch.contiguous_format)


def prepare(
    group: Group,
    operands: Operands,
    sent: Sent,
    config: GemmConfig,
    mark: int,
    buffers: int,
    buffer_bytes: int,
    own_buffer: int,
    *,
    batch: Batch | None = None,
    tile_stores: bool = True,
) -> Launch:
    """Return the launch. Collective when the workspace must grow.

    Args:
        mark: The number from the ranks' agreement.
        buffers: The address of rank 0's copy of the first output buffer.
        buffer_bytes: Bytes from one buffer to the next.
        own_buffer: The index of the buffer that this rank's result goes to.
        batch: What the operands consist of; default: one product.
        tile_stores: Whether tiles travel by copies out of shared memory where the GPU has them;
            else by ordinary stores.
    """
    require(group.backend)
    from interlace.operators.gemm_all_to_all import kernel

    ranks, me = group.world_size, group.rank
    batch = batch or Batch(1, operands.rows, operands.columns)
    workspace = group.workspace(NAME, 4096, layout.HEADER)
    routes, first = [], 0
    for dest in range(ranks):
        before = batch.count * sum(sent[source][dest] for source in range(me))
        routes.append((first, sent[me][dest], before))
        first += sent[me][dest]
    dtype = operands.out_dtype
    stride = padded_columns(batch.columns, dtype)
    received = [batch.count * sum(counts[dest] for counts in sent) for dest in range(ranks)]
    descriptors = has_descriptors(group) and group.stride % 16 == 0
    part_rows = _part_rows(sent, max(received), config.block_m)
    tiles = None
    if descriptors and tile_stores and part_rows and ranks > 1:
        sizes = [
            (BUFFERS + 1, buffer_bytes // dtype.itemsize),
            (ceil_div(max(received), part_rows), part_rows * stride),
            (part_rows, stride),
            (batch.columns, 1),
        ]
        tiles = describe_ranks(group, buffers, dtype, sizes, [config.block_m, config.block_n])
    align = ALIGNMENT_BYTES // dtype.itemsize
    arguments = operand_arguments(operands, config, descriptors) | {
        "tiles": tiles,
        "buffers": buffers,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(NAME),
        "routes": on_device(group, routes),
        "call": mark,
        "buffer_bytes": buffer_bytes,
        "own_buffer": own_buffer,
        "most_rows": max(max(counts) for counts in sent),
        "own_rows": received[me],
        "part_rows": part_rows or 1,
        "product_rows": batch.rows,
        "N": batch.columns,
        "K": operands.inner,
        "row_groups": stride // align,
        "spread_ns": spread_ns(config, operands.inner),
    }
    shared = constants(
        operands, config, group, descriptors=descriptors, tile_stores=tiles is not None
    )
    return Launch(
        kernel.gemm_all_to_all,
        (programs(group, config),),
        arguments,
        shared | {"BATCH": batch.count},
        (operands,),
    )


def _part_rows(sent: Sent, most_received: int, block_m: int) -> int:
    """Return the rows of the parts of an output that no tile may reach beyond; 0 if there are no
    such parts.
    """
    counts = {count for of_source in sent for count in of_source}
    # As many rows from every source: a part for each, of each product.
    if len(counts) == 1:
        return max(counts)
    # Tiles end where the source's rows end, so the output may be a single part.
    return most_received if all(count % block_m == 0 for count in counts) else 0
