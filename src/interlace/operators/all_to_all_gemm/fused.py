"""The launch of the fused kernel of ``all_to_all_gemm``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from interlace.comm import MAX_PROGRAMS, Group
from interlace.comm.groups.outputs import Destination, Output, taking_output
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import Launch, describe_matrix
from interlace.comm.replay.deferred import DeferredCall
from interlace.comm.runtime.interpreter import require
from interlace.gemm import launch
from interlace.gemm.config import GemmConfig
from interlace.gemm.kernels import layout
from interlace.gemm.operands import Operands
from interlace.gemm.sequence import SequenceCall
from interlace.tuning.configuration import between
from interlace.units import ceil_div

NAME = "all_to_all_gemm"

_MOVED = 32, 512  # rows and columns that a sender has in flight at a time

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class AllToAllGemmConfig(GemmConfig):
    """One way to run the fused kernel of ``all_to_all_gemm``; see :class:`GemmConfig`, of whose
    fields ``interleave`` and ``stagger`` mean nothing here.

    Attributes:
        senders: Programs that send this rank's columns, beside the ``max_programs`` that multiply.
    """

    senders: int = between(16, 1, 1 << 20)


def run(call: SequenceCall) -> DeferredCall | Pair:
    """Return the product of this rank's rows, ``[S_s, N]``, and the gathered rows, ``[S_s, K]``, or
    none of them.
    """
    operands, group = call.operands.for_kernel(), call.group
    own_rows, inner, columns = call.rows[group.rank], operands.w.shape[1], operands.columns
    dtype = operands.out_dtype
    shape = [own_rows, launch.padded_columns(columns, dtype)]
    if group.world_size == 1:
        y = operands.x.new_empty(shape)
        product = prepare(call, operands, None, operands.x, y)
        with group.running():
            product()
        gathered = operands.x.new_empty(own_rows if call.gather else 0, inner)
        if call.gather:
            gathered.copy_(operands.x)
        return launch.without_padding(y, columns), gathered
    # Peers store their columns straight into what may be a result, so it is symmetric memory.
    stride = launch.padded_columns(inner, dtype)
    take_output = taking_output(_output_bytes(call), [own_rows, stride], dtype)
    device = operands.x.device

    def take(group: Group) -> tuple[Output, torch.Tensor, torch.Tensor]:
        return *take_output(group), torch.empty(shape, dtype=dtype, device=device)

    def prepare_launch(
        output: Output, gathered: torch.Tensor, y: torch.Tensor
    ) -> Callable[[], None]:
        # Before anything is enqueued: the workspace may have to grow.
        group.workspace(*_signals(call))
        return lambda: prepare(call, operands, output.destination, gathered, y)()

    return DeferredCall(
        (NAME, *call.memory()),
        take,
        prepare_launch,
        functools.partial(_results, columns=columns, inner=inner, gather=call.gather),
        where=_where,
        is_of_operands=operands is call.operands,
    )


def _results(
    output: Output,
    gathered: torch.Tensor,
    y: torch.Tensor,
    *,
    columns: int,
    inner: int,
    gather: bool,
) -> Pair:
    """Return the product and the gathered rows as callers get them."""
    product = launch.without_padding(y, columns)
    if not gather:
        return product, gathered.new_empty(0, inner)
    return product, launch.output_rows(output, gathered, columns=inner)


def _where(output: Output, gathered: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    """Return what the work depends on of its memory."""
    return output.destination, y.data_ptr()


def reservation(call: SequenceCall) -> Reservation:
    """Return the symmetric memory of a call: signals, and the gathered rows."""
    return Reservation((_signals(call),), _output_bytes(call))


def _signals(call: SequenceCall) -> WorkspaceSize:
    """Return the size of the workspace, which is there for its signals: one for each source and
    block of rows.
    """
    blocks = ceil_div(max(call.rows), call.config.block_m)
    return WorkspaceSize(NAME, 4096, layout.HEADER + len(call.rows) * blocks)


def _output_bytes(call: SequenceCall) -> int:
    """Return the bytes of the gathered rows of the rank that has most."""
    columns = max(call.operands.w.shape[1], 1)
    return launch.output_bytes(max(call.rows), columns, call.operands.out_dtype)


def prepare(
    call: SequenceCall,
    operands: Operands,
    destination: Destination | None,
    gathered: torch.Tensor,
    y: torch.Tensor,
) -> Launch:
    """Return the launch. Collective when the workspace must grow.

    Args:
        operands: The call's, as :meth:`Operands.for_kernel` returns them.
        destination: The output buffer that gets the gathered rows; None in a group of one rank.
        gathered: ``[S_s, padded K]`` over this rank's copy of that buffer; x in a group of one.
        y: ``[S_s, padded N]``.
    """
    group, config, rows = call.group, call.config, call.rows
    assert isinstance(config, AllToAllGemmConfig)
    require(group.backend)
    from interlace.gemm.kernels.grants import OutputBuffers
    from interlace.operators.all_to_all_gemm import kernel

    ranks, me, x = group.world_size, group.rank, operands.x
    inner, columns = operands.w.shape[1], operands.columns
    workspace = group.workspace(*_signals(call))
    counts = call.column_counts
    first_column = sum(counts[:me])
    routes = [(sum(rows[:rank]), rows[rank], 0) for rank in range(ranks)]
    descriptors = launch.moves_tiles(group.device)
    # The product's operands are the gathered rows.
    multiplied = dataclasses.replace(operands, x=gathered[:, :inner])
    product = launch.operand_arguments(multiplied, config, descriptors)
    result = None
    if descriptors:
        result = describe_matrix(y[:, :columns], y.shape[1], [config.block_m, config.block_n])
    stride, gathered_stride = launch.row_stride(x), launch.row_stride(multiplied.x)
    # Senders come on top: when they have left, as many multiplying programs take their places.
    programs, senders = launch.programs(group, config), 0
    if ranks > 1:
        senders = min(config.senders, programs, MAX_PROGRAMS // 2)
        programs = min(programs, MAX_PROGRAMS - senders) + senders
    arguments = {
        # Symmetric memory comes as an address, unless through a descriptor.
        "x": x,
        "gathered": product["x"] if descriptors else None,
        "w": product["w"],
        "bias": product["bias"],
        "buffers": OutputBuffers(*(destination[:2] if destination else (0, 0))),
        "own_buffer": destination.own_index if destination else 0,
        "result": result,
        "y_address": y.data_ptr(),
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(NAME),
        "routes": group.cache.tables.on_device(routes),
        "call": call.mark,
        "per_source": (workspace.signal_count - layout.HEADER) // ranks,
        "most_rows": max(rows),
        "own_rows": rows[me],
        "own_columns": counts[me],
        "place": first_column,
        "cells": gathered.numel() if call.gather and ranks > 1 else 0,
        "N": columns,
        "K": inner,
        "x_stride": stride,
        "gathered_stride": gathered_stride,
        "w_stride": product["w_stride"],
        "y_stride": y.shape[1],
    }
    shared = launch.constants(
        multiplied, config, group, descriptors=descriptors, tile_stores=result is not None
    )
    return Launch(
        kernel.all_to_all_gemm,
        (programs,),
        arguments,
        {
            **shared,
            # The kernel takes these numbers as they come, so Triton does not look at them.
            "PUSHING": kernel.ColumnPushing(
                senders, *_MOVED, math.gcd(16, counts[me], first_column, stride, gathered_stride)
            ),
        },
        (operands, gathered, y),
    )
