"""The launches of ``all_gather_gemm``: its fused kernel, and copies or stores before cuBLAS."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from interlace.comm import Group
from interlace.comm.groups import copies
from interlace.comm.groups.reservation import Reservation
from interlace.comm.launching.kernels import Launch, describe_matrix, describe_parts
from interlace.comm.replay.deferred import DeferredCall, New
from interlace.comm.replay.replays import AgainCall
from interlace.comm.runtime.dlpack import bytes_at, view_as
from interlace.comm.runtime.interpreter import require
from interlace.gemm import fetch, launch
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.fetch import Piece, Staging, offset_behind
from interlace.gemm.implementations.chunked import multiply_into
from interlace.gemm.implementations.pushed import (
    Push,
    laid_out,
    multiply,
    multiply_by_faster,
    push_rows,
)
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands
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


def _gather_and_multiply(given: GemmCall, impl: str, prepare: Prepare) -> DeferredCall | Pair:
    """Return the work of gathering x and multiplying it."""
    call = laid_out(given.with_operands(given.operands.with_contiguous_rows()))
    operands, group, rows = call.operands, call.group, call.rows.by_rank
    if group.world_size == 1:
        y = operands.x.new_empty([sum(rows), operands.columns])
        multiply(call, y, operands.x, operands.bias)
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
            OVERLAP,
            operands.memory(),
        ),
        _memory(operands, rows, operands.columns),
        functools.partial(prepare, call),
        _results(operands, call.gather),
        # Copy engines know the pages of a copy, not its address, so graphs with copies are kept by
        # the allocation, too.
        copied=(1,) if impl == "chunked" else (),
        is_of_operands=operands is given.operands,
    )


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How ``"chunked"`` orders its steps.

    Attributes:
        tells_beside: Whether peers are told of rows in place beside the first product, not before
            it.
        settles_first: Whether arrivals are checked before the peers' rows are multiplied, beside
            the product of this rank's own rows; else behind all products. With more than two ranks
            it is always behind them.
        multiplies_beside: Whether the peers' rows are multiplied beside this rank's own rows, as
            soon as they have arrived; else behind them.
        first_rows: Rows of this rank that are multiplied before the peer's, of two ranks; its other
            rows are multiplied together with them, in one product. 0: all of them.
    """

    tells_beside: bool = False
    settles_first: bool = True
    multiplies_beside: bool = False
    first_rows: int = 0


OVERLAP = Overlap()


class _Product(NamedTuple):
    """A product of some rows.

    Attributes:
        begin, end: The rows, among those of all ranks.
        source: The rank whose rows must have arrived; None for rows that are read from x.
    """

    begin: int
    end: int
    source: int | None


def _products(rank: int, rows: Sequence[int], first_rows: int) -> list[_Product]:
    """Return the products of all ranks' rows in their order: this rank's own rows, then the
    neighbour's and so on; or of two ranks ``first_rows`` of this rank's, then all others.
    """
    ranks, total = len(rows), sum(rows)
    if ranks == 2 and 0 < first_rows < rows[rank]:
        # What comes later lies next to the peer's rows.
        if rank == 0:
            return [_Product(0, first_rows, None), _Product(first_rows, total, 1)]
        begin = total - first_rows
        return [_Product(begin, total, None), _Product(0, begin, 0)]
    begins = [sum(rows[:each]) for each in range(ranks)]
    order = [(rank + step) % ranks for step in range(ranks)]
    return [
        _Product(begins[each], begins[each] + rows[each], None if each == rank else each)
        for each in order
    ]


def _prepare_chunked(call: GemmCall, y: torch.Tensor, gathered: torch.Tensor) -> Callable[[], None]:
    operands, group, rows = call.operands, call.group, call.rows.by_rank
    staging, overlap, in_place = _staging(operands, rows), OVERLAP, call.place is not None
    staging.workspace(group)
    settles_first = overlap.settles_first and group.world_size == 2
    products = _products(group.rank, rows, overlap.first_rows)
    own_begin = sum(rows[: group.rank])

    def enqueue() -> None:
        weight = operands.w.T

        def multiply(product: _Product) -> None:
            begin, end, source = product
            if source is None:
                x = operands.x[begin - own_begin : end - own_begin]
            else:
                copies.wait_for(group, arrivals[source])
                x = gathered[begin:end, : operands.inner]
            multiply_into(y[begin:end], x, weight, operands.bias)

        settle = functools.partial(fetch.settle, group, staging, mark=call.mark, in_place=in_place)
        first, *others = products
        start = copies.so_far(group)
        arrivals = _begin(
            call, operands, staging, gathered, signal=False, tells_beside=overlap.tells_beside,
            multiplied=range(first.begin - own_begin, first.end - own_begin),
        )  # fmt: skip
        if settles_first:
            with fetch.behind(group):
                settle(gathered, None)
                arrivals[1 - group.rank] = copies.so_far(group)
        if overlap.multiplies_beside:
            with copies.beside(group, since=start):
                for product in others:
                    multiply(product)
            multiply(first)
            copies.join(group)
        else:
            for product in products:
                multiply(product)
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
    pushes: list[Push] = []

    def prepare(call: GemmCall, y: torch.Tensor, gathered: torch.Tensor) -> Callable[[], None]:
        operands, rows = call.operands, call.rows.by_rank
        push = push_rows(call.group, NAME, operands.x, gathered, rows, call.mark)
        pushes.append(push)

        def enqueue() -> None:
            push()
            multiply(call, y, gathered[:, : operands.inner], operands.bias)

        return enqueue

    work = _gather_and_multiply(given, "pushed", prepare)
    if not isinstance(work, DeferredCall) or not work.is_of_operands or given.is_batch_invariant:
        return work
    return dataclasses.replace(work, again=lambda: _push_again(given, work, pushes[-1]))


def _push_again(call: GemmCall, work: DeferredCall, push: Push) -> AgainCall | None:
    """Return what gathers other rows like a call's, and multiplies them."""
    prepare = push.again("x", "gathered")
    if prepare is None:
        return None
    take, results, inner = work.take, work.result, call.operands.inner

    def again(
        group: Group,
        _: Hashable,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> Pair:
        y, gathered = take(group)
        enqueue = prepare(group)
        with group.running():
            enqueue(x=x, gathered=gathered)
            multiply_by_faster(y, gathered[:, :inner], w, bias)
        pair: Pair = results(y, gathered)
        return pair

    return again


def _begin(
    call: GemmCall,
    operands: Operands,
    staging: Staging,
    gathered: torch.Tensor,
    *,
    signal: bool,
    tells_beside: bool = False,
    multiplied: range | None = None,
) -> fetch.Arrivals:
    """Enqueue the copies of the peers' rows into ``gathered``; see
    :func:`interlace.gemm.fetch.begin`.

    Args:
        multiplied: The rows of x that are multiplied where they lie; default: all. The others are
            copied to ``gathered``.
    """
    group, rows = call.group, call.rows.by_rank
    in_place, own_rows = call.place is not None, rows[group.rank]
    own_address, own = None, None
    if call.gather or (multiplied is not None and len(multiplied) < own_rows):
        first = 0
        if in_place and not call.gather and multiplied is not None:
            first = 0 if multiplied.start else multiplied.stop
            own = operands.x[first : multiplied.start or own_rows]
        begin = sum(rows[: group.rank]) + first
        own_address = gathered.data_ptr() + begin * staging.row_bytes
    return fetch.begin(
        group,
        staging,
        operands.x,
        operands.x_scale,
        gathered,
        _pieces(group, staging, rows, gathered),
        call.mark,
        own_address=own_address,
        own=own,
        in_place=in_place,
        tells_beside=tells_beside and own_address is None,
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
    new = New(device, (product, ([_scale_offset(shape, dtype) + 4 * rows], torch.uint8)))

    def take(group: Group) -> tuple[torch.Tensor, ...]:
        y, memory = new(group)
        return y, view_as(memory, shape, dtype)

    return take


def _scale_offset(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes from rows of this shape to their scales."""
    return offset_behind(math.prod(shape) * dtype.itemsize)


def _staging(operands: Operands, splits: Sequence[int]) -> Staging:
    return Staging(NAME, max(splits), operands.inner, operands.x.dtype)


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
        if rows and gathered.dtype.itemsize == 1:  # float8 has scales
            pieces.append(Piece(staging.scale_offset, scales + 4 * first, 4 * rows))
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
            return product, gathered[:, :inner].contiguous()
        return product, gathered.new_empty([0, inner])

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
    scales = None
    if operands.x_scale is not None:
        address = gathered.data_ptr() + _scale_offset(gathered.shape, dtype)
        memory = bytes_at(address, (4 * len(gathered),), (1,), group.device, gathered)
        scales = view_as(memory, (len(gathered),), torch.float32)
    arguments = launch.operand_arguments(operands, config, descriptors) | {
        "gathered": gathered_tiles,
        "gathered_scales": scales,
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
