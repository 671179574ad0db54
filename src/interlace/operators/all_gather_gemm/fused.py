"""The launches of ``all_gather_gemm``: its fused kernel, and copies or stores before cuBLAS."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.comm import Group
from interlace.comm.groups import copies
from interlace.comm.groups.reservation import Reservation
from interlace.comm.launching.kernels import Launch, describe_matrix, describe_parts
from interlace.comm.replay.deferred import DeferredCall, New, empty
from interlace.comm.runtime.dlpack import tensor_at
from interlace.comm.runtime.interpreter import require
from interlace.gemm import fetch, launch
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.fetch import Piece, Staging, offset_behind
from interlace.gemm.implementations.pushed import (
    laid_out,
    multiply,
    push_rows,
)
from interlace.gemm.launch import KernelOfWords
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands, RowPart, Weight
from interlace.gemm.products import multiply_by_faster, multiply_into
from interlace.units import ceil_div

NAME = "all_gather_gemm"

Pair = tuple[torch.Tensor, torch.Tensor]


def run(call: GemmCall) -> DeferredCall | Pair:
    """Return the product ``[M, N]`` by one kernel, and the gathered x, ``[M, K]`` or no rows."""
    operands, group, rows = call.operands.for_kernel(), call.group, call.rows.by_rank
    config, mark = call.config, call.mark
    staging = _staging(operands, rows)
    # Before anything is enqueued: the workspace may have to grow.
    staging.workspace(group)

    def prepare_launches(y: torch.Tensor, gathered: torch.Tensor) -> Callable[[], None]:
        def enqueue() -> None:
            product = prepare(
                group, staging, operands, rows, y, gathered, config, mark, gather=call.gather,
                in_place=call.place is not None,
            )  # fmt: skip
            if group.world_size == 1:
                product()
                return
            # 1. Tell peers of this rank's rows, then fetch theirs beside the product.
            _begin(call, operands, staging, gathered, signal=True)
            # 2. The product waits for each source's signal in the kernel.
            product()
            fetch.end(group)

        return enqueue

    columns = launch.padded_columns(operands.columns, operands.out_dtype)
    work = DeferredCall(
        (NAME, "fused", config, rows, call.gather, mark, call.place, operands.memory()),
        _memory(operands, rows, columns),
        prepare_launches,
        _results(operands, call.gather),
        copied=(1,),
        is_of_operands=operands is call.operands,
    )
    if group.world_size > 1:
        return work
    y, _ = group.perform(work)
    return y, _gathered_alone(operands, call.gather)


def staged_reservation(call: GemmCall) -> Reservation:
    """Return the symmetric memory of a call whose rows copy engines fetch: this rank's rows."""
    staging = _staging(call.operands, call.rows.by_rank)
    return Reservation((staging.size(call.group.world_size),))


def pushed_reservation(call: GemmCall) -> Reservation:
    """Return the symmetric memory of a call whose rows one kernel stores in all ranks' memory."""
    rows, row_bytes = call.rows.by_rank, _staging(call.operands, call.rows.by_rank).row_bytes
    slot_bytes = ceil_div(sum(rows) * row_bytes, call.group.world_size)
    return launch.lamport_reservation(call, "pushed", slot_bytes)


Prepare = Callable[[GemmCall, torch.Tensor, torch.Tensor], Callable[[], None]]
"""Returns what enqueues a call whose product and gathered x are the two tensors. Collective when
the workspace must grow, so it comes before anything is enqueued.
"""


def _gather_and_multiply(original: GemmCall, impl: str, prepare: Prepare) -> DeferredCall | Pair:
    """Return the work of gathering x and multiplying it."""
    call = laid_out(original.with_operands(original.operands.with_contiguous_rows()))
    call = call.with_operands(_with_scales_of_rows(call.operands))
    operands, group, rows = call.operands, call.group, call.rows.by_rank
    if group.world_size == 1:
        y = operands.x.new_empty([sum(rows), operands.columns], dtype=operands.out_dtype)
        multiply(call, y, operands.all_rows(), operands.bias)
        return y, _gathered_alone(operands, call.gather)
    require(group.backend)
    return DeferredCall(
        (
            NAME,
            impl,
            rows,
            call.gather,
            call.mark,
            call.is_batch_invariant,
            call.place,
            operands.memory(),
        ),
        _memory(operands, rows, operands.columns),
        functools.partial(prepare, call),
        _results(operands, call.gather),
        # Copy engines know the pages of a copy, not its address, so graphs with copies are kept by
        # the allocation, too.
        copied=(1,) if impl == "chunked" else (),
        is_of_operands=operands is original.operands,
    )


def _with_scales_of_rows(operands: Operands) -> Operands:
    """Return operands whose x has contiguous scales for each row, which travel with it."""
    scale = operands.x_scale
    if scale is None or (scale.is_contiguous() and len(scale) == operands.rows):
        return operands
    if not operands.has_block_scales:
        scale = scale.expand(operands.rows)
    return dataclasses.replace(operands, x_scale=scale.contiguous())


def _prepare_chunked(call: GemmCall, y: torch.Tensor, gathered: torch.Tensor) -> Callable[[], None]:
    operands, group, rows = call.operands, call.group, call.rows.by_rank
    staging, rank, ranks = _staging(operands, rows), group.rank, group.world_size
    staging.workspace(group)
    # With more ranks, one that is late would hold up the products of all others' rows.
    settles_first = ranks == 2

    def enqueue() -> None:
        # A view costs the host as much time as enqueueing a copy, so each tensor is split once.
        arriving = dataclasses.replace(
            operands,
            x=gathered[:, : operands.inner],
            x_scale=_gathered_scales(operands, gathered),
        ).split(rows)
        parts = y.split(rows)
        weight, in_place = operands.weight(), call.place is not None
        settle = functools.partial(fetch.settle, group, staging, mark=call.mark, in_place=in_place)
        arrivals = _begin(call, operands, staging, gathered, signal=False)
        if settles_first:
            # Beside the product of this rank's own rows, so that nothing follows the products.
            with fetch.behind(group):
                settle(gathered, None)
                arrivals[1 - rank] = copies.so_far(group)
        for step in range(ranks):
            source = (rank + step) % ranks
            part = operands.all_rows()
            if source != rank:
                copies.wait_for(group, arrivals[source])
                part = arriving[source]
            multiply_into(parts[source], part, weight, operands.bias)
        fetch.end(group)
        if not settles_first:
            settle(gathered if call.gather else None, y)

    return enqueue


# All-gather in chunks: cuBLAS multiplies each rank's rows as soon as they have arrived, this rank's
# own rows first.
run_chunked = functools.partial(_gather_and_multiply, impl="chunked", prepare=_prepare_chunked)


def run_pushed(given: GemmCall) -> DeferredCall | Pair:
    """Gather x by one kernel that stores this rank's rows in all ranks' memory; another one
    multiplies all rows once they have arrived.
    """
    pushes: list[KernelOfWords] = []

    def prepare(call: GemmCall, y: torch.Tensor, gathered: torch.Tensor) -> Callable[[], None]:
        operands, rows = call.operands, call.rows.by_rank
        push = push_rows(call.group, NAME, operands.x, gathered, rows, call.mark)
        pushes.append(push)

        def enqueue() -> None:
            push()
            multiply(call, y, RowPart(gathered[:, : operands.inner]), operands.bias)

        return enqueue

    work = _gather_and_multiply(given, "pushed", prepare)
    if not isinstance(work, DeferredCall) or not work.is_of_operands or given.is_batch_invariant:
        return work
    take, result = work.take, work.result
    return dataclasses.replace(
        work,
        again=lambda: pushes[-1].again(
            ("x", "gathered"), take, _push_and_multiply, result, reads_in_place=True
        ),
    )


def _push_and_multiply(
    enqueue: Callable[..., None],
    memory: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Gather other rows like a call's, and multiply them."""
    y, gathered = memory
    enqueue(x=x, gathered=gathered)
    inner = x.shape[1]
    rows = gathered if gathered.shape[1] == inner else gathered[:, :inner]
    multiply_by_faster(y, RowPart(rows), Weight.of(w), bias)


def _begin(
    call: GemmCall,
    operands: Operands,
    staging: Staging,
    gathered: torch.Tensor,
    *,
    signal: bool,
) -> fetch.Arrivals:
    """Enqueue the copies of the peers' rows into ``gathered``; see
    :func:`interlace.gemm.fetch.begin`.
    """
    group, rows = call.group, call.rows.by_rank
    own_address = None
    if call.gather:
        own_address = gathered.data_ptr() + sum(rows[: group.rank]) * staging.row_bytes
    return fetch.begin(
        group,
        staging,
        operands.x,
        operands.x_scale,
        gathered,
        _pieces(group, staging, rows, gathered),
        call.mark,
        own_address=own_address,
        in_place=call.place is not None,
        signal=signal,
    )


def _memory(
    operands: Operands, splits: Sequence[int], columns: int
) -> Callable[[Group], tuple[torch.Tensor, ...]]:
    """Return what allocates the product, ``[M, columns]``, and memory for all ranks' rows, ``[M,
    padded K]``, with their scales behind it.
    """
    device, dtype, rows = operands.x.device, operands.x.dtype, sum(splits)
    product = [rows, columns], operands.out_dtype
    shape = [rows, launch.padded_columns(max(operands.inner, 1), dtype)]
    if operands.x_scale is None:
        return New(device, (product, (shape, dtype)))
    # Scales lie behind the rows in the same memory, so that one tensor keeps both alive.
    nbytes = _scale_offset(shape, dtype) + 4 * rows * _scales(operands)
    new = New(device, (product, ([nbytes], torch.uint8)))

    def take(group: Group) -> tuple[torch.Tensor, ...]:
        y, memory = new(group)
        return y, memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    return take


def _scale_offset(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes from rows of this shape to their scales."""
    return offset_behind(math.prod(shape) * dtype.itemsize)


def _scales(operands: Operands) -> int:
    """Return the number of scales that each row has."""
    if operands.x_scale is None:
        return 0
    return operands.x_scale.shape[1] if operands.has_block_scales else 1


def _gathered_scales(operands: Operands, gathered: torch.Tensor) -> torch.Tensor | None:
    """Return the scales behind the gathered rows: ``[M]``, or of blocks ``[M, ceil(K / 128)]``."""
    count = _scales(operands)
    if not count:
        return None
    address = gathered.data_ptr() + _scale_offset(gathered.shape, gathered.dtype)
    shape = (len(gathered), count) if operands.has_block_scales else (len(gathered),)
    return tensor_at(address, shape, torch.float32, operands.x.device, gathered)


def _staging(operands: Operands, splits: Sequence[int]) -> Staging:
    dtype, scales = operands.x.dtype, _scales(operands)
    return Staging(NAME, max(splits), operands.inner, dtype, scales)


def _pieces(
    group: Group, staging: Staging, splits: Sequence[int], gathered: torch.Tensor
) -> dict[int, list[Piece]]:
    """Return what is fetched from each peer, the neighbour first."""
    scales = gathered.data_ptr() + _scale_offset(gathered.shape, gathered.dtype)
    by_source: dict[int, list[Piece]] = {}
    # Each rank begins with another peer, so no two fetch from the same one at a time.
    for step in range(1, group.world_size):
        source = (group.rank + step) % group.world_size
        rows, first = splits[source], sum(splits[:source])
        by_source[source] = pieces = []
        row_scales = 4 * staging.scales
        if rows and row_scales:
            target = scales + row_scales * first
            pieces.append(Piece(staging.scale_offset, target, row_scales * rows))
        if rows:
            pieces.append(
                Piece(0, gathered.data_ptr() + first * staging.row_bytes, rows * staging.row_bytes)
            )
    return by_source


def _results(operands: Operands, gather: bool) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    """Return what makes of a call's memory the product ``[M, N]`` and the gathered x as callers get
    it: ``[M, K]``, or no rows unless ``gather``.
    """
    columns, inner = operands.columns, operands.inner

    def results(y: torch.Tensor, gathered: torch.Tensor) -> Pair:
        product = launch.without_padding(y, columns)
        if gather:
            return product, launch.without_padding(gathered, inner)
        return product, empty([0, inner], gathered.dtype, gathered.device)

    return results


def _gathered_alone(operands: Operands, gather: bool) -> torch.Tensor:
    """Return the gathered x of a group of one, which is x."""
    if not gather:
        return operands.x.new_empty([0, operands.inner])
    return operands.x.clone(memory_format=torch.contiguous_format)


def prepare(
    group: Group,
    staging: Staging,
    operands: Operands,
    splits: Sequence[int],
    y: torch.Tensor,
    gathered: torch.Tensor,
    config: GemmConfig,
    mark: int = 0,
    *,
    gather: bool = False,
    in_place: bool = False,
) -> Launch:
    """Return the product's launch.

    Args:
        splits: The rows of each rank.
        y: ``[M, padded columns]``.
        gathered: The gathered x, ``[M, padded K]``, with its scales behind it.
        mark: The number from the ranks' agreement.
        gather: Whether ``gathered`` becomes NaN where a peer's rows do not arrive.
        in_place: Whether peers fetch this rank's rows from x itself, so that the product must not
            end before they have.
    """
    require(group.backend)
    from interlace.operators.all_gather_gemm import kernel

    ranks, dtype, workspace = group.world_size, operands.x.dtype, staging.workspace(group)
    routes = group.cache.tables.on_device(
        [(sum(splits[:rank]), splits[rank], 0) for rank in range(ranks)]
    )
    descriptors = launch.moves_tiles(group.device)
    # Tiles are stored as a whole only if the descriptor cuts off what lies beyond their source's
    # rows.
    part_rows = _part_rows(splits, config.block_m)
    tiles = descriptors and part_rows > 0
    gathered_tiles: Any = gathered[:, : max(operands.inner, 1)]
    if descriptors:
        gathered_tiles = describe_matrix(
            gathered_tiles, gathered.shape[1], [config.block_m, config.block_k]
        )
    result = None
    if tiles:
        parts = y[:, : operands.columns].unflatten(0, (-1, part_rows))
        result = describe_parts(parts, [config.block_m, config.block_n])
    inner_align = ALIGNMENT_BYTES // dtype.itemsize
    arguments = launch.operand_arguments(operands, config, descriptors) | {
        "gathered": gathered_tiles,
        "gathered_scales": _gathered_scales(operands, gathered),
        "filled": gathered if gather else None,
        "cells": gathered.numel() if gather else 0,
        "result": result,
        "y_address": y.data_ptr(),
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(NAME),
        "routes": routes,
        "call": mark,
        "most_rows": max(splits),
        "part_rows": max(part_rows, 1),
    }
    shared = launch.constants(operands, config, group, descriptors=descriptors, tile_stores=tiles)
    multipliers = launch.programs(group, config)
    if ranks > 1 and group.backend == "cuda":
        # Copies within a GPU, which set the product's signals, are kernels that need an SM.
        multipliers = max(multipliers - 1, 1)
    return Launch(
        kernel.all_gather_gemm,
        (multipliers,),
        arguments,
        shared | {"INNER_ALIGN": inner_align, "IN_PLACE": in_place},
        (operands, y, gathered),
    )


def _part_rows(splits: Sequence[int], block_m: int) -> int:
    """Return the rows of the parts of the result that no tile may reach beyond; 0 if there are no
    such parts.
    """
    if len(set(splits)) == 1:
        return splits[0]
    # Tiles end where their rank's rows end, and behind the last rank's rows there is nothing.
    return sum(splits) if all(count % block_m == 0 for count in splits[:-1]) else 0
