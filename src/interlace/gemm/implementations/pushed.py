"""``impl="pushed"``: one small kernel that stores rows in the peers' memory, before a product by a
kernel of its own, or after it.

It is for few rows: nothing is hidden, and nothing is in the way either. Copy engines take
microseconds to begin, and a product in chunks reads its weight once for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from interlace.comm import Group
from interlace.comm.groups.reservation import Reservation
from interlace.comm.launching.kernels import (
    CPU_PROGRAMS,
    MOST_MOVERS,
    Launch,
    cut_rows,
    known_factor,
)
from interlace.comm.launching.within_node import WithinNode
from interlace.comm.replay.deferred import DeferredCall, New
from interlace.comm.replay.replays import AgainCall
from interlace.comm.runtime.interpreter import require
from interlace.gemm import few_rows
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.launch import (
    KernelOfWords,
    lamport_arguments,
    lamport_reservation,
    row_stride,
)
from interlace.gemm.operands import FLOAT8, RowPart, Weight
from interlace.gemm.products import multiply_by_faster
from interlace.registry import Implementation
from interlace.units import ceil_div, round_up

_MOST_BYTES = 16 << 20
"""Of a product: with more, signals cost less than memory that is read again and again and freed."""

_MOST_PARTS_BYTES = 64 << 20
"""Of the parts of all ranks that each sums in an all-reduce; the memory for them is twice as much.
With more than two ranks each should sum a share of so much.
"""

_CHUNK = 2048


def sum_slot_bytes(elements: int, itemsize: int) -> int:
    """Return the bytes of a slot for a part of a sum."""
    return round_up(elements, 16) * itemsize


def push_rows(
    group: Group | WithinNode,
    operator: str,
    x: torch.Tensor,
    gathered: torch.Tensor,
    rows: Sequence[int],
    mark: int,
    *,
    scatter: bool = False,
    offsets: Sequence[int] | None = None,
) -> KernelOfWords:
    """Return the kernel that brings rows to other ranks. Collective when the workspace must grow.

    Args:
        group: The ranks that exchange rows.
        operator: The operator that the deadline's error names, and whose memory it is.
        x: This rank's rows, contiguous along K.
        gathered: ``[..., padded K]``, contiguous: where all ranks' rows arrive; NaN where they do
            not come.
        rows: The number of rows that each rank gives to each.
        mark: The number from ``Group.agree``.
        scatter: Whether x has ``rows`` for rank 0, then as many for rank 1, and so on; else every
            rank gets all of x.
        offsets: The row at which each rank's rows arrive; default: behind those of the ranks before
            it.
    """
    ranks, columns = group.world_size, x.shape[1]

    def describe(memory: Mapping[str, Any]) -> Launch:
        from interlace.gemm.kernels import staged

        # A route is the row at which a source's rows begin in ``gathered``, and their number.
        starts = offsets or [sum(rows[:rank]) for rank in range(ranks)]
        routes = [(start, count, 0) for start, count in zip(starts, rows, strict=True)]
        programs, tile = cut_rows(max(rows), columns, group)
        arguments = {
            **memory,
            "x": x,
            "gathered": gathered,
            "routes": group.cache.tables.on_device(routes),
            "K": columns,
            "x_stride": row_stride(x),
            "gathered_stride": gathered.shape[-1],
            "cells": gathered.numel(),
        }
        factor = known_factor(columns, row_stride(x), gathered.shape[-1])
        constants = {"WORLD_SIZE": ranks, "SCATTER": scatter, "FACTOR": factor, **tile}
        # The program behind them finds out whether the ranks are in the same call.
        return Launch(staged.spread_rows, (programs + 1,), arguments, constants)

    slot_bytes = ceil_div(gathered.nbytes, ranks)
    return _kernel(group, operator, slot_bytes, mark, describe)


def push_and_sum(
    group: Group | WithinNode,
    operator: str,
    part: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    mark: int,
    *,
    scatter: bool = True,
    in_tree: bool = False,
) -> KernelOfWords:
    """Return the kernel that sums parts of all ranks. Collective when the workspace must grow.

    Args:
        group: The ranks that sum.
        operator: The operator that the deadline's error names, and whose memory it is.
        part: Contiguous; this rank's part of every rank's sum, ``[R, rows, N]`` or ``[R * rows,
            N]``, or without ``scatter`` of the sum that all ranks have, ``[rows, N]``.
        y: ``[rows, N]``, contiguous: where this rank's sum goes, float32 in rank order and rounded
            once; NaN where parts do not come.
        bias: ``[N]``, added to the sum; None for none.
        mark: The number from ``Group.agree``.
        scatter: Whether each rank has a sum of its own.
        in_tree: Whether ranks are added in a tree of pairs.
    """
    slot_bytes = sum_slot_bytes(y.numel(), y.element_size())
    chunks = ceil_div(y.numel(), _CHUNK)
    programs = min(chunks, CPU_PROGRAMS if group.backend == "cpu" else MOST_MOVERS)

    def describe(memory: Mapping[str, Any]) -> Launch:
        from interlace.gemm.kernels.lamport import sum_parts

        arguments = {
            **memory,
            "part": part,
            "bias": bias,
            "y": y,
            "elements": y.numel(),
            "N": y.shape[1],
        }
        constants = {
            "WORLD_SIZE": group.world_size,
            "SCATTER": scatter,
            "FACTOR": known_factor(y.numel(), y.shape[1]),
            "CHUNK": _CHUNK,
            "IN_TREE": in_tree,
        }
        # The program behind them finds out whether the ranks are in the same call.
        return Launch(sum_parts, (programs + 1,), arguments, constants)

    return _kernel(group, operator, slot_bytes, mark, describe)


def _kernel(
    group: Group | WithinNode,
    operator: str,
    slot_bytes: int,
    mark: int,
    describe: Callable[[dict[str, Any]], Launch],
) -> KernelOfWords:
    find = functools.partial(
        lamport_arguments, operator=operator, impl="pushed", slot_bytes=slot_bytes, mark=mark
    )
    return KernelOfWords(group, find, describe)


def reserve(group: Group | WithinNode, operator: str, nbytes: int) -> None:
    """Allocate the symmetric memory of these kernels for calls in which ``nbytes`` arrive.

    Collective when it must grow, so it comes before anything is enqueued.
    """
    # A slot of a sum is rounded up to 16 elements.
    slot_bytes = ceil_div(nbytes, group.world_size) + 16 * torch.float32.itemsize
    lamport_arguments(group, operator, "pushed", slot_bytes, mark=0)


def multiply(call: GemmCall, out: torch.Tensor, rows: RowPart, bias: torch.Tensor | None) -> None:
    """Compute ``rows @ call.operands.w.T, + bias`` into ``out``, by whichever kernel is faster.

    cuBLAS adds up in another order for another number of rows, so batch-invariant calls never take
    it.

    Args:
        out: ``[M, N]``, contiguous.
        rows: ``[M, K]``.
        bias: ``[N]``, or None for none.
    """
    weight = call.operands.weight()
    if not call.is_batch_invariant:
        multiply_by_faster(out, rows, weight, bias)
        return
    scales = None
    if rows.scale is not None and weight.scale is not None:
        scales = rows.scale, weight.scale
    few_rows.multiply(
        rows.x,
        [weight.w],
        [bias],
        [out],
        is_batch_invariant=True,
        leaves=max(call.leaves, 1),
        scales=scales,
    )


def laid_out(call: GemmCall) -> GemmCall:
    """Return a call whose operands :func:`multiply` takes; a kernel of our own copies unaligned
    ones, and so do products of float8.
    """
    operands = call.operands
    if call.is_batch_invariant:
        return call.with_operands(operands.for_kernel())
    if operands.x.dtype == FLOAT8:
        return call.with_operands(operands.with_contiguous_rows())
    return call


PushOf = Callable[[GemmCall, torch.Tensor, torch.Tensor], KernelOfWords]
"""Returns the kernel that takes a call's product to its result, the two tensors."""


def _run(call: GemmCall, push: PushOf) -> torch.Tensor | DeferredCall:
    """Multiply, then run a kernel that stores the product's rows in their owners' memory.

    Returns:
        ``[rows of this rank, N]``.
    """
    laid = laid_out(call)
    name, operands, group = laid.operator.name, laid.operands, laid.group
    # The bias of a sum over ranks is added once, behind it, before the sum is rounded. In a tree
    # that is within the product of a rank that has all leaves.
    is_whole = group.world_size == 1 and laid.leaves > 0
    bias = operands.bias if is_whole or not laid.operator.adds_ranks else None
    product_shape = [operands.rows, operands.columns]
    if group.world_size == 1:
        product = operands.x.new_empty(product_shape, dtype=operands.out_dtype)
        multiply(laid, product, operands.all_rows(), bias)
        if operands.bias is not None and bias is None:
            product += operands.bias
        return product
    require(group.backend)
    dtype, device = operands.out_dtype, operands.x.device
    take = New(device, (([laid.rows.result, operands.columns], dtype), (product_shape, dtype)))
    prepared: list[KernelOfWords] = []

    def prepare(y: torch.Tensor, product: torch.Tensor) -> Callable[[], None]:
        pushed = push(laid, product, y)
        prepared.append(pushed)

        def enqueue() -> None:
            multiply(laid, product, operands.all_rows(), bias)
            pushed()

        return enqueue

    return DeferredCall(
        (name, "pushed", laid.mark, laid.is_batch_invariant, laid.leaves, operands.memory()),
        take,
        prepare,
        is_of_operands=operands is call.operands,
        # A kernel of our own that multiplies batch-invariantly, or float8, may need copies of
        # operands.
        again=None
        if call.is_batch_invariant or operands.x_scale is not None
        else lambda: _again(call, take, prepared[-1]),
    )


def _again(call: GemmCall, take: New, pushed: KernelOfWords) -> AgainCall | None:
    """Return what multiplies other operands of these shapes, and enqueues the kernel behind it."""
    if call.operator.adds_ranks:
        return pushed.again(("part", "y", "bias"), take, _multiply_and_sum)
    return pushed.again(("x", "gathered"), take, _multiply_and_push)


def _multiply_and_sum(
    enqueue: Callable[..., None],
    memory: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    y, product = memory
    multiply_by_faster(product, RowPart(x), Weight.of(w), None)
    enqueue(part=product, y=y, bias=bias)


def _multiply_and_push(
    enqueue: Callable[..., None],
    memory: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    y, product = memory
    multiply_by_faster(product, RowPart(x), Weight.of(w), bias)
    enqueue(x=product, gathered=y)


def _push_all_to_all(call: GemmCall, product: torch.Tensor, y: torch.Tensor) -> KernelOfWords:
    group = call.group
    rows = [len(product) // group.world_size] * group.world_size
    return push_rows(group, call.operator.name, product, y, rows, call.mark, scatter=True)


def _push_sum(
    call: GemmCall, part: torch.Tensor, y: torch.Tensor, *, scatter: bool
) -> KernelOfWords:
    name, bias = call.operator.name, call.operands.bias
    in_tree = call.leaves > 0
    return push_and_sum(
        call.group, name, part, y, bias, call.mark, scatter=scatter, in_tree=in_tree
    )


def _moved_reservation(call: GemmCall) -> Reservation:
    arriving_bytes = call.rows.result * call.operands.columns * call.operands.out_dtype.itemsize
    return lamport_reservation(call, "pushed", ceil_div(arriving_bytes, call.group.world_size))


def _sum_reservation(call: GemmCall) -> Reservation:
    operands, elements = call.operands, call.rows.result * call.operands.columns
    slot_bytes = sum_slot_bytes(elements, operands.out_dtype.itemsize)
    return lamport_reservation(call, "pushed", slot_bytes)


PUSHED_ALL_REDUCE = Implementation(
    "pushed",
    "a product, then one kernel that stores the parts in the peers' memory and sums them",
    functools.partial(_run, push=functools.partial(_push_sum, scatter=False)),
    needs(same_dtype=True, most_parts_bytes=_MOST_PARTS_BYTES),
    schedule="to_all",
    is_batch_invariant=True,
    reservation=_sum_reservation,
)
PUSHED_ALL_TO_ALL = Implementation(
    "pushed",
    "a product, then one kernel that stores the rows in the peers' memory",
    functools.partial(_run, push=_push_all_to_all),
    needs(even_rows=True, same_dtype=True, most_bytes=_MOST_BYTES),
    is_batch_invariant=True,
    reservation=_moved_reservation,
)
PUSHED_REDUCE_SCATTER = Implementation(
    "pushed",
    "a product, then one kernel that stores the rows in the peers' memory and sums them",
    functools.partial(_run, push=functools.partial(_push_sum, scatter=True)),
    needs(even_rows=True, same_dtype=True, most_bytes=_MOST_BYTES),
    is_batch_invariant=True,
    reservation=_sum_reservation,
)
