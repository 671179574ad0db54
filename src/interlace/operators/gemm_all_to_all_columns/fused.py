"""The launch of the fused kernel of ``gemm_all_to_all_columns``."""

from __future__ import annotations

import math

import torch

from interlace.comm.groups.outputs import BUFFERS, Destination
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import Launch, describe_ranks
from interlace.comm.replay.deferred import DeferredCall
from interlace.comm.runtime.interpreter import require
from interlace.gemm import launch
from interlace.gemm.kernels import layout as signals
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands
from interlace.gemm.sequence import SequenceCall
from interlace.operators.gemm_all_to_all_columns.layout import (
    FIRST_COLUMN,
    TARGETS,
    columns_of_tiles,
)
from interlace.units import ceil_div

NAME = "gemm_all_to_all_columns"

# Tiles go straight into results, so the workspace is there for its signals.
_SIGNALS = WorkspaceSize(NAME, 4096, signals.HEADER)


def run(call: SequenceCall) -> DeferredCall | torch.Tensor:
    """Return this rank's columns of all ranks' rows, ``[S, N_d]``, by one kernel."""
    return launch.run_into_peers(
        call.group,
        call.operands,
        sum(call.rows),
        call.column_counts[call.group.rank],
        _output_bytes(call),
        (NAME, *call.memory()),
        lambda _, operands, destination: prepare(call, operands, destination),
    )


def reservation(call: SequenceCall) -> Reservation:
    """Return the symmetric memory of a call: signals, and the result."""
    return Reservation((_SIGNALS,), _output_bytes(call))


def _output_bytes(call: SequenceCall) -> int:
    """Return the bytes of the result of the rank that has most columns."""
    return launch.output_bytes(sum(call.rows), max(call.column_counts), call.operands.out_dtype)


def prepare(
    call: SequenceCall,
    operands: Operands,
    destination: Destination,
    *,
    tile_stores: bool = True,
) -> Launch:
    """Return the launch. Collective when the workspace must grow.

    Args:
        operands: The call's, as :meth:`Operands.for_kernel` returns them.
        destination: The output buffer that this rank's result goes to.
        tile_stores: Whether tiles travel by copies out of shared memory where the GPU has them and
            the columns of every rank consist of whole tiles; else by ordinary stores.
    """
    group, config, rows = call.group, call.config, call.rows
    require(group.backend)
    from interlace.gemm.kernels.grants import OutputBuffers
    from interlace.operators.gemm_all_to_all_columns import kernel

    ranks, me, dtype = group.world_size, group.rank, operands.out_dtype
    workspace = group.workspace(*_SIGNALS)
    columns = columns_of_tiles(call.columns, config.block_n, me)
    counts = call.column_counts
    strides = [launch.padded_columns(count, dtype) for count in counts]
    descriptors = (
        launch.moves_tiles(group.device)
        and group.stride % 16 == 0
        and are_read_by_descriptors(columns, operands)
    )
    part_rows = _part_rows(rows, config.block_m)
    tiles = None
    # A tile is stored as a whole, so a descriptor must know where its rows and columns end: there
    # is one for all ranks, whose results then are alike.
    has_whole_tiles = len(set(counts)) == 1 and all(entry[1] == config.block_n for entry in columns)
    if descriptors and tile_stores and part_rows and has_whole_tiles and ranks > 1:
        sizes = [
            (BUFFERS + 1, destination.buffer_bytes // dtype.itemsize),
            (ceil_div(sum(rows), part_rows), part_rows * strides[me]),
            (part_rows, strides[me]),
            (counts[me], 1),
        ]
        tiles = describe_ranks(
            group, destination.address, dtype, sizes, [config.block_m, config.block_n]
        )
    arguments = launch.operand_arguments(operands, config, descriptors) | {
        "tiles": tiles,
        "buffers": OutputBuffers(destination.address, destination.buffer_bytes),
        "own_buffer": destination.own_index,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(NAME),
        "columns": group.cache.tables.on_device(columns),
        "strides": group.cache.tables.on_device([strides]),
        "call": call.mark,
        "rows": rows[me],
        "first_row": call.first_row,
        "part_rows": part_rows or 1,
        "own_cells": sum(rows) * strides[me],
        "tiles_n": len(columns),
        "spread_ns": launch.spread_ns(config, operands.inner),
    }
    del arguments["scales"]  # of float8, which this operator does not multiply
    return Launch(
        kernel.gemm_all_to_all_columns,
        (launch.programs(group, config),),
        arguments,
        {
            **launch.constants(
                operands, config, group, descriptors=descriptors, tile_stores=tiles is not None
            ),
            "OWNERS": (len(columns[0]) - TARGETS) // 2,
            "FACTOR": _factor(columns, strides),
        },
        (operands,),
    )


def are_read_by_descriptors(columns: list[tuple[int, ...]], operands: Operands) -> bool:
    """Return whether a descriptor can load the weight's part of every tile.

    What it loads must begin at a multiple of 16 bytes: GPUs report an illegal instruction
    otherwise. Along K it does; where columns are neighbours in memory, ranges may begin anywhere.
    """
    itemsize = operands.w.element_size()
    return operands.w_along_k or all(
        entry[FIRST_COLUMN] * itemsize % ALIGNMENT_BYTES == 0 for entry in columns
    )


def _factor(columns: list[tuple[int, ...]], strides: list[int]) -> int:
    """Return the power of two, at most 16, that divides all that addresses in results depend on."""
    numbers = (number for _, count, *pairs in columns for number in (count, *pairs[1::2]))
    return math.gcd(16, *strides, *numbers)


def _part_rows(rows: tuple[int, ...], block_m: int) -> int:
    """Return the rows of the parts of a result that no tile may reach beyond; 0 if there are no
    such parts.
    """
    # As many rows from every source: a part for each.
    if len(set(rows)) == 1:
        return rows[0]
    # Tiles end where the source's rows end, so the result may be a single part.
    return sum(rows) if all(count % block_m == 0 for count in rows) else 0
