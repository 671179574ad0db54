"""``impl="fused"``: kernels that send rows as they compute them.

In the backward pass gradients travel as tokens do, and results as results. The launches of both
passes are in :mod:`interlace.operators.mixture_of_experts.fused_launches`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from interlace.comm import Group, Workspace
from interlace.comm.groups.outputs import Output
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.replay.deferred import DeferredCall, addresses
from interlace.comm.replay.replays import places
from interlace.comm.runtime.interpreter import require
from interlace.costs.mixture_of_experts import NUMBER_BYTES, operand_row_bytes
from interlace.operators.mixture_of_experts import layout, stock
from interlace.operators.mixture_of_experts.call import BACKWARD, LayerCall
from interlace.operators.mixture_of_experts.choice import ExpertTerms
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.operators.mixture_of_experts.layout import ExpertSizes, Saved
from interlace.units import ceil_div

_RESULTS = f"{OPERATOR}.results"


def run(call: LayerCall) -> DeferredCall:
    """Return the work whose result is ``y [T, hidden]``, and the tensors that the backward pass
    needs.
    """

    def prepared(space: Output, y: torch.Tensor, *saved: torch.Tensor) -> Callable[[], None]:
        workspaces(call, OPERATOR)  # what may have to grow
        if call.keeps and call.group.memory.limit_bytes is not None:
            # Its backward pass must not find later that others have taken what was left.
            workspaces(call, BACKWARD)
        require(call.group.backend)
        from interlace.operators.mixture_of_experts.fused_launches import forward_launches

        def enqueue() -> None:
            for launch in forward_launches(call, space, y, *saved):
                launch()

        return enqueue

    return DeferredCall(
        (OPERATOR, "fused", call.mark, *call.memory()),
        forward_memory(call),
        prepared,
        results,
        where=_places,
        with_libraries=False,
        temporary_bytes=temporary_bytes(call, call.sizes.arrivals),
    )


def forward_memory(call: LayerCall) -> Callable[[Group], tuple[Any, ...]]:
    """Return what takes the memory of a forward pass that outlives its launches: the buffer in
    which rows for this rank's experts arrive, ``y [T, hidden]``, and, if the call saves them, the
    tensors of :class:`Saved`.
    """
    return functools.partial(
        _take, call.sizes, call.x.dtype, call.x.device, call.is_float8, call.saves, call.new
    )


def _take(
    sizes: ExpertSizes,
    dtype: torch.dtype,
    device: torch.device,
    is_float8: bool,
    saves: bool,
    new: Callable[..., torch.Tensor],
    group: Group,
) -> tuple[Output | torch.Tensor, ...]:
    # Rows that the backward pass needs arrive in a buffer that stays in use until then.
    reserve = group.outputs.take if saves else group.outputs.landing
    space = reserve(buffer_bytes(sizes, dtype, is_float8))
    y = torch.empty((sizes.tokens, sizes.hidden), dtype=dtype, device=device)
    if not saves:
        return space, y
    received = space.tensor((sizes.arrivals, sizes.hidden), dtype, device)
    kept = new((sizes.gates, sizes.arrivals, sizes.ffn), dtype=dtype, device=device)
    return space, y, *layout.numbers(sizes, device, new), received, kept


def results(space: Output, y: torch.Tensor, *taken: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    if not taken:
        return y, Saved.nothing(y)
    saved = Saved(*taken)
    # The landing is written again by the next call, so its rows cannot be kept for the backward
    # pass, but must be copied.
    return y, saved if space.lent else saved._replace(received=saved.received.clone())


def _places(space: Output, *tensors: torch.Tensor) -> Hashable:
    """Return what the work of a pass depends on of the memory that it has taken."""
    return space.destination, addresses(*tensors)


def backward(
    call: LayerCall, grad: torch.Tensor, saved: Saved, needed: Sequence[bool]
) -> DeferredCall | tuple[torch.Tensor, ...]:
    """Return the work whose results are the gradients of x, weights, w_in, w_out, b_in and b_out.

    The last four are empty unless they are ``needed``.
    """
    if not call.saves:
        return stock.backward(call, grad, saved, needed)

    def prepared(space: Output, *gradients: torch.Tensor) -> Callable[[], None]:
        workspaces(call, BACKWARD)  # what may have to grow
        require(call.group.backend)
        from interlace.operators.mixture_of_experts.fused_launches import backward_launches

        def enqueue() -> None:
            for launch in backward_launches(call, grad, saved, needed, space, *gradients):
                launch()

        return enqueue

    return DeferredCall(
        (BACKWARD, call.mark, tuple(needed), *call.memory(), *places(grad, *saved)),
        backward_memory(call, needed),
        prepared,
        lambda space, *gradients: gradients,
        where=_places,
        with_libraries=False,
        temporary_bytes=temporary_bytes(call, call.sizes.arrivals, 2 + call.sizes.gates),
    )


def backward_memory(call: LayerCall, needed: Sequence[bool]) -> Callable[[Group], tuple[Any, ...]]:
    """Return what takes the memory of a backward pass: where peers' gradients arrive, and the
    gradients of x, weights and parameters.
    """
    nbytes, device = buffer_bytes(call.sizes, call.x.dtype), call.x.device
    likes = (
        torch.empty(call.x.shape, dtype=call.x.dtype, device="meta"),
        torch.empty(call.weights.shape, dtype=call.weights.dtype, device="meta"),
        *call.parameters.gradients(needed, device="meta"),
    )
    layouts = [(like.shape, like.stride(), like.dtype) for like in likes]

    def take(group: Group) -> tuple[Any, ...]:
        gradients = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype in layouts
        ]
        return group.outputs.landing(nbytes), *gradients

    return take


def temporary_bytes(call: LayerCall, rows: int, width: int = 1) -> int:
    """Return the bytes that a pass takes for itself: rows of its experts, and copies of weights
    that kernels cannot read where they are.

    Args:
        call: The call.
        rows: The rows.
        width: Their width, as a multiple of the experts' inner one.
    """
    copies = [weight.nbytes for weight in (call.w_in, call.w_out) if layout.is_copied(weight)]
    return rows * width * call.sizes.ffn * call.x.dtype.itemsize + sum(copies)


def buffer_bytes(sizes: ExpertSizes, dtype: torch.dtype, is_float8: bool = False) -> int:
    """Return the bytes of a buffer in which rows for a rank's experts arrive, with their scales."""
    row_bytes = operand_row_bytes(sizes.hidden, dtype.itemsize, is_float8=is_float8)
    # Backward, a row of other dtypes has a scale: its slot's weight.
    return sizes.arrivals * (row_bytes + (0 if is_float8 else NUMBER_BYTES))


def workspaces(call: LayerCall, operator: str) -> tuple[Workspace, Workspace]:
    """Return the memory of a pass for numbers and signals, and for the rows that come back.
    Collective when it must grow.

    Args:
        call: The call.
        operator: The name of the pass.
    """
    results, numbers = workspace_sizes(call.sizes, call.x.dtype, operator)
    workspace = call.group.workspace(*results)
    return call.group.workspace(*numbers), workspace


def workspace_sizes(
    sizes: ExpertSizes, dtype: torch.dtype, operator: str
) -> tuple[WorkspaceSize, WorkspaceSize]:
    """Return the sizes of the workspaces of a pass: for the rows that come back, and for numbers
    and signals.
    """
    # The workspace's two halves are used as one: peers write here only once this rank is in its
    # next call.
    row_bytes = sizes.hidden * dtype.itemsize
    results = WorkspaceSize(_RESULTS, ceil_div(sizes.returns * (row_bytes + 4), 2))
    numbers = 4 * sizes.world_size * (sizes.experts + 1)
    return results, WorkspaceSize(operator, numbers, layout.SIGNALS)


def reservation(terms: ExpertTerms) -> Reservation:
    """Return the symmetric memory of a call, with its backward pass if there is one."""
    sizes, dtype = terms.sizes, terms.dtype
    names = [OPERATOR, BACKWARD] if terms.keeps else [OPERATOR]
    results, *_ = workspace_sizes(sizes, dtype, OPERATOR)
    numbers = [workspace_sizes(sizes, dtype, name)[1] for name in names]
    return Reservation((results, *numbers), buffer_bytes(sizes, dtype, terms.is_float8))
