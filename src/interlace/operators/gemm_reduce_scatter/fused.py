"""The launch of the fused kernel of ``gemm_reduce_scatter``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from interlace.comm import Group
from interlace.comm.groups.reservation import Reservation
from interlace.comm.launching.kernels import Launch
from interlace.comm.replay.deferred import DeferredCall, New
from interlace.comm.runtime.interpreter import require
from interlace.gemm import launch
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import Operands

NAME = "gemm_reduce_scatter"


def run(call: GemmCall) -> DeferredCall:
    """Return this rank's rows of the sum, ``[rows, N]``, by one kernel."""
    operands, group, rows = call.operands.for_kernel(), call.group, call.rows.by_rank
    # A descriptor needs rows that begin at multiples of 16 bytes. Where they do anyhow, the copy at
    # the end is none.
    stride = launch.padded_columns(operands.columns, operands.out_dtype)
    config, mark = call.config, call.mark
    in_rank_order, leaves = call.is_batch_invariant, call.leaves

    return DeferredCall(
        (NAME, config, mark, in_rank_order, leaves, rows, operands.memory()),
        New(operands.x.device, (([rows[group.rank], stride], operands.out_dtype),)),
        # The launch is prepared within ``Group.running``.
        lambda y: (
            lambda: prepare(
                group, operands, rows, y, config, mark, in_rank_order=in_rank_order, leaves=leaves
            )()
        ),
        functools.partial(launch.without_padding, columns=operands.columns),
        is_of_operands=operands is call.operands,
    )


def reservation(call: GemmCall) -> Reservation:
    """Return the symmetric memory of a call: slots for the parts of this rank's rows."""
    columns, dtype = call.operands.columns, call.operands.out_dtype
    return Reservation((launch.slots_size(NAME, call.rows.by_rank, columns, dtype, call.config),))


def prepare(
    group: Group,
    operands: Operands,
    rows: Sequence[int],
    y: torch.Tensor,
    config: GemmConfig,
    mark: int = 0,
    *,
    tile_stores: bool = True,
    in_rank_order: bool = False,
    leaves: int = 0,
) -> Launch:
    """Return the launch. Collective when the workspace must grow.

    Args:
        rows: The rows of each rank.
        y: ``[rows[rank], padded columns]``.
        mark: The number from the ranks' agreement.
        tile_stores: Whether tiles travel by copies out of shared memory where the GPU has them;
            else by ordinary stores.
        in_rank_order: Whether a sum has the same bits whichever rank computes it.
        leaves: As a ``GemmCall`` has them.
    """
    require(group.backend)
    from interlace.gemm.kernels.reduction import SlotHalves
    from interlace.operators.gemm_reduce_scatter import kernel

    dtype = operands.out_dtype
    descriptors = launch.moves_tiles(group.device)
    tiles = descriptors and tile_stores
    slots = launch.slots_for(group, NAME, rows, operands.columns, dtype, config, tiles)
    block = [config.block_m, config.block_n]
    arguments = launch.operand_arguments(operands, config, descriptors, leaves) | {
        "slots": slots.tiles,
        "results": launch.describe_own(y, operands.columns, block) if tiles else None,
        "waiting": launch.describe_waiting(group, operands, config, leaves, tiles),
        "halves": SlotHalves(slots.workspace.data.address, slots.workspace.half_bytes),
        "y_address": y.data_ptr(),
        "signals": slots.workspace.signals.address,
        "epochs": slots.workspace.epochs,
        "ctx": group.context(NAME),
        "routes": slots.routes,
        "call": mark,
        "per_source": slots.per_source,
        "most_rows": max(rows),
        "spread_ns": launch.spread_ns(config, operands.inner),
    }
    return Launch(
        kernel.gemm_reduce_scatter,
        (launch.programs(group, config),),
        arguments,
        launch.constants(
            operands,
            config,
            group,
            descriptors=descriptors,
            tile_stores=tiles,
            in_rank_order=in_rank_order,
            leaves=leaves,
        ),
        (operands, y),
    )
