"""The launch of the fused kernel of ``gemm_all_reduce``."""

from __future__ import annotations

import torch

from interlace.comm import Group
from interlace.comm.groups.outputs import BUFFERS, Destination
from interlace.comm.groups.reservation import Reservation
from interlace.comm.launching.kernels import Launch, describe_ranks
from interlace.comm.replay.deferred import DeferredCall
from interlace.comm.runtime.interpreter import require
from interlace.gemm import launch
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import Operands
from interlace.gemm.splits import balanced, balanced_tiles

NAME = "gemm_all_reduce"


def run(call: GemmCall) -> DeferredCall | torch.Tensor:
    """Return the sum, ``[M, N]``, the same on every rank, by one kernel."""
    operands, config, mark = call.operands, call.config, call.mark
    in_rank_order, leaves = call.is_batch_invariant, call.leaves
    return launch.run_into_peers(
        call.group,
        operands,
        operands.rows,
        operands.columns,
        launch.output_bytes(operands.rows, operands.columns, operands.out_dtype),
        (NAME, config, mark, in_rank_order, leaves),
        lambda group, operands, destination: prepare(
            group, operands, config, mark, destination, in_rank_order=in_rank_order, leaves=leaves
        ),
    )


def _shares(rows: int, ranks: int, config: GemmConfig, tiles: bool) -> list[int]:
    """Return the rows that each rank sums."""
    if tiles:
        # A whole tile at the end of one rank's rows would cover the next rank's; behind the last
        # rank's rows there is nothing.
        return balanced_tiles(rows, ranks, config.block_m)
    return balanced(rows, ranks)


def reservation(call: GemmCall) -> Reservation:
    """Return the symmetric memory of a call: slots for the parts of this rank's share, and the
    result.
    """
    operands, group, config = call.operands, call.group, call.config
    columns, dtype = operands.columns, operands.out_dtype
    rows = _shares(operands.rows, group.world_size, config, launch.moves_tiles(group.device))
    slots = launch.slots_size(NAME, rows, columns, dtype, config)
    return Reservation((slots,), launch.output_bytes(operands.rows, columns, dtype))


def prepare(
    group: Group,
    operands: Operands,
    config: GemmConfig,
    mark: int,
    destination: Destination,
    *,
    in_rank_order: bool = False,
    leaves: int = 0,
) -> Launch:
    """Return the launch. Collective when the workspace must grow.

    Args:
        mark: The number from the ranks' agreement.
        destination: The output buffer that this rank's result goes to.
        in_rank_order: Whether a sum has the same bits whichever rank computes it.
        leaves: As a ``GemmCall`` has them.
    """
    require(group.backend)
    from interlace.gemm.kernels.grants import OutputBuffers
    from interlace.gemm.kernels.reduction import SlotHalves
    from interlace.operators.gemm_all_reduce.kernels import fused as kernels

    dtype, tiles = operands.out_dtype, launch.moves_tiles(group.device)
    rows = _shares(operands.rows, group.world_size, config, tiles)
    slots = launch.slots_for(group, NAME, rows, operands.columns, dtype, config, tiles)
    stride, results = launch.padded_columns(operands.columns, dtype), None
    if tiles:
        # Buffers have room for the largest call so far. A rank on its own has one buffer without a
        # distance to the next, which a descriptor must have.
        elements = operands.rows * stride
        sizes = [
            (BUFFERS + 1, max(destination.buffer_bytes // dtype.itemsize, elements)),
            (1, elements),
            (operands.rows, stride),
            (operands.columns, 1),
        ]
        results = describe_ranks(
            group, destination.address, dtype, sizes, [config.block_m, config.block_n]
        )
    arguments = launch.operand_arguments(operands, config, tiles, leaves) | {
        "slots": slots.tiles,
        "results": results,
        "waiting": launch.describe_waiting(group, operands, config, leaves, tiles),
        "halves": SlotHalves(slots.workspace.data.address, slots.workspace.half_bytes),
        "buffers": OutputBuffers(destination.address, destination.buffer_bytes),
        "own_buffer": destination.own_index,
        "signals": slots.workspace.signals.address,
        "epochs": slots.workspace.epochs,
        "ctx": group.context(NAME),
        "routes": slots.routes,
        "call": mark,
        "per_source": slots.per_source,
        "most_rows": max(rows),
        "M": operands.rows,
        "spread_ns": launch.spread_ns(config, operands.inner),
    }
    return Launch(
        kernels.gemm_all_reduce,
        (launch.programs(group, config),),
        arguments,
        launch.constants(
            operands,
            config,
            group,
            descriptors=tiles,
            tile_stores=tiles,
            in_rank_order=in_rank_order,
            leaves=leaves,
        ),
        (operands,),
    )
