"""``impl="pushed"``: one small kernel that stores rows in the peers' memory, before a product by a
kernel of its own, or after it.

It is for few rows: nothing is hidden, and nothing is in the way either. Copy engines take
microseconds to begin, and a product in chunks reads its weight once for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

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
from interlace.comm.runtime.interpreter import require
from interlace.gemm import few_rows
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.chunked import multiply_into
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.launch import lamport_arguments, lamport_reservation, row_stride
from interlace.gemm.operands import FLOATS
from interlace.registry import Implementation
from interlace.units import ceil_div, round_up

_MOST_BYTES = 16 << 20
"""Of a product: with more, signals cost less than memory that is read again and again and freed,
and of an all-reduce each rank should sum a share.
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
) -> Callable[[], None]:
    """Return a function that enqueues the kernel on the current stream, within ``Group.running``.

    Collective when the workspace must grow.

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
    slot_bytes = ceil_div(gathered.nbytes, ranks)
    memory = lamport_arguments(group, operator, "pushed", slot_bytes, mark)

    def enqueue() -> None:
        from interlace.gemm.kernels import staged

        # A route is the row at which a source's rows begin in ``gathered``, and their number.
        starts = offsets or [sum(rows[:rank]) for rank in range(ranks)]
        routes = [(start, count, 0) for start, count in zip(starts, rows, strict=True)]
        programs, tile = cut_rows(max(rows), columns, group)
        arguments = memory | {
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
        Launch(staged.spread_rows, (programs + 1,), arguments, constants)()

    return enqueue


def push_and_sum(
    group: Group | WithinNode,
    operator: str,
    part: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    mark: int,
    *,
    scatter: bool = True,
) -> Callable[[], None]:
    """Return a function that enqueues the kernel on the current stream, within ``Group.running``.

    Collective when the workspace must grow.

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
    """
    slot_bytes = sum_slot_bytes(y.numel(), y.element_size())
    arguments = lamport_arguments(group, operator, "pushed", slot_bytes, mark) | {
        "part": part,
        "bias": bias,
        "y": y,
        "elements": y.numel(),
        "N": y.shape[1],
    }
    chunks = ceil_div(y.numel(), _CHUNK)
    programs = min(chunks, CPU_PROGRAMS if group.backend == "cpu" else MOST_MOVERS)

    def enqueue() -> None:
        from interlace.gemm.kernels.lamport import sum_parts

        constants = {
            "WORLD_SIZE": group.world_size,
            "SCATTER": scatter,
            "FACTOR": known_factor(y.numel(), y.shape[1]),
            "CHUNK": _CHUNK,
        }
        # The program behind them finds out whether the ranks are in the same call.
        Launch(sum_parts, (programs + 1,), arguments, constants)()

    return enqueue


def reserve(group: Group | WithinNode, operator: str, nbytes: int) -> None:
    """Allocate the symmetric memory of these kernels for calls in which ``nbytes`` arrive.

    Collective when it must grow, so it comes before anything is enqueued.
    """
    # A slot of a sum is rounded up to 16 elements.
    slot_bytes = ceil_div(nbytes, group.world_size) + 16 * torch.float32.itemsize
    lamport_arguments(group, operator, "pushed", slot_bytes, mark=0)


def multiply(call: GemmCall, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Compute ``x @ call.operands.w.T, + bias`` into ``out``, by whichever kernel is faster.

    cuBLAS adds up in another order for another number of rows, so batch-invariant calls never take
    it.

    Args:
        out: ``[M, N]``, contiguous.
        x: ``[M, K]``.
        bias: ``[N]``, or None for none.
    """
    w = call.operands.w
    if call.is_batch_invariant or few_rows.is_faster(x, w):
        few_rows.multiply(x, [w], [bias], [out], is_batch_invariant=call.is_batch_invariant)
    else:
        multiply_into(out, x, w.T, bias)


def laid_out(call: GemmCall) -> GemmCall:
    """Return a call whose operands :func:`multiply` takes; a kernel of our own copies unaligned
    ones.
    """
    operands = call.operands
    return call.with_operands(operands.for_kernel()) if call.is_batch_invariant else call


Push = Callable[[GemmCall, torch.Tensor, torch.Tensor], Callable[[], None]]
"""Returns what enqueues the kernel that takes a call's product to its result, the two tensors."""


def _run(call: GemmCall, push: Push) -> torch.Tensor | DeferredCall:
    """Multiply, then run a kernel that stores the product's rows in their owners' memory.

    Returns:
        ``[rows of this rank, N]``.
    """
    laid = laid_out(call)
    operands, group = laid.operands, laid.group
    # The bias of a sum over ranks is added once, behind it.
    bias = None if laid.operator.adds_ranks else operands.bias
    product_shape = [operands.rows, operands.columns]
    if group.world_size == 1:
        product = operands.x.new_empty(product_shape)
        multiply(laid, product, operands.x, bias)
        if operands.bias is not None and bias is None:
            product += operands.bias
        return product
    require(group.backend)

    def prepare(y: torch.Tensor, product: torch.Tensor) -> Callable[[], None]:
        pushed = push(laid, product, y)

        def enqueue() -> None:
            multiply(laid, product, operands.x, bias)
            pushed()

        return enqueue

    return DeferredCall(
        (laid.operator.name, "pushed", laid.mark, laid.is_batch_invariant, operands.memory()),
        New.like(operands.x, [laid.rows.result, operands.columns], product_shape),
        prepare,
        is_of_operands=operands is call.operands,
    )


def _push_all_to_all(call: GemmCall, product: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    group = call.group
    rows = [len(product) // group.world_size] * group.world_size
    return push_rows(group, call.operator.name, product, y, rows, call.mark, scatter=True)


def _push_sum(
    call: GemmCall, part: torch.Tensor, y: torch.Tensor, *, scatter: bool
) -> Callable[[], None]:
    name, bias = call.operator.name, call.operands.bias
    return push_and_sum(call.group, name, part, y, bias, call.mark, scatter=scatter)


def _moved_reservation(call: GemmCall) -> Reservation:
    arriving_bytes = call.rows.result * call.operands.columns * call.operands.x.itemsize
    return lamport_reservation(call, "pushed", ceil_div(arriving_bytes, call.group.world_size))


def _sum_reservation(call: GemmCall) -> Reservation:
    elements = call.rows.result * call.operands.columns
    return lamport_reservation(call, "pushed", sum_slot_bytes(elements, call.operands.x.itemsize))


PUSHED_ALL_REDUCE = Implementation(
    "pushed",
    "a product, then one kernel that stores the parts in the peers' memory and sums them",
    functools.partial(_run, push=functools.partial(_push_sum, scatter=False)),
    needs(same_dtype=True, dtypes=FLOATS, most_bytes=_MOST_BYTES),
    schedule="to_all",
    is_batch_invariant=True,
    reservation=_sum_reservation,
)
PUSHED_ALL_TO_ALL = Implementation(
    "pushed",
    "a product, then one kernel that stores the rows in the peers' memory",
    functools.partial(_run, push=_push_all_to_all),
    needs(even_rows=True, same_dtype=True, dtypes=FLOATS, most_bytes=_MOST_BYTES),
    is_batch_invariant=True,
    reservation=_moved_reservation,
)
PUSHED_REDUCE_SCATTER = Implementation(
    "pushed",
    "a product, then one kernel that stores the rows in the peers' memory and sums them",
    functools.partial(_run, push=functools.partial(_push_sum, scatter=True)),
    needs(even_rows=True, same_dtype=True, dtypes=FLOATS, most_bytes=_MOST_BYTES),
    is_batch_invariant=True,
    reservation=_sum_reservation,
)
