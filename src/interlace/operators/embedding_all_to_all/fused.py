"""The implementation ``fused``: one kernel that computes and communicates, in each direction."""

from __future__ import annotations

import torch

from interlace.comm.groups.outputs import Destination, destination_of, kept, taking_output
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import Launch
from interlace.comm.replay.deferred import DeferredCall
from interlace.comm.runtime.interpreter import require
from interlace.operators.embedding_all_to_all import (
    backward,
    between_nodes,
    gradients_between_nodes,
    pooling,
)
from interlace.operators.embedding_all_to_all.call import EmbeddingCall
from interlace.operators.embedding_all_to_all.config import OPERATOR
from interlace.operators.embedding_all_to_all.layout import (
    HEADER,
    MAX_RANKS,
    Layout,
    SizedLookups,
)
from interlace.operators.embedding_all_to_all.lookups import Sorted
from interlace.units import ceil_div


def refusal(call: EmbeddingCall) -> str | None:
    """Return what a call must have for the kernels and has not, or None."""
    ranks = call.layout.world_size
    if call.group.spans_nodes and ranks > MAX_RANKS:
        return f"at most {MAX_RANKS} ranks; got {ranks}"
    return None


_SIGNALS = WorkspaceSize(OPERATOR, 4096, HEADER)


def _output_bytes(layout: Layout, itemsize: int) -> int:
    """Return the bytes of the rank's result that has most samples."""
    return layout.chunk * layout.columns * itemsize


def forward_reservation(layout: Layout, itemsize: int) -> Reservation:
    """Return the symmetric memory of the forward pass on one node.

    Args:
        layout: The columns of all tables and the samples of all ranks.
        itemsize: Of the output, and so of gradients that travel.
    """
    return Reservation((_SIGNALS,), _output_bytes(layout, itemsize))


def reservation(sized: SizedLookups) -> Reservation:
    """Return the symmetric memory of a call, with its backward pass if there is one."""
    forward = forward_reservation(sized.layout, sized.itemsize)
    if not sized.has_backward:
        return forward
    return forward.then(backward.reservation(sized.layout, sized.itemsize))


def run(call: EmbeddingCall) -> DeferredCall | torch.Tensor:
    """Return ``[samples of this rank, columns]``, which peers store to. Collective."""
    group, layout = call.group, call.layout
    if group.spans_nodes:
        return between_nodes.run(call)
    if layout.world_size == 1:
        return pooling.pool(call)
    shape = [layout.samples(call.rank), layout.columns]
    return DeferredCall(
        (OPERATOR, call.mark, call.config, layout, call.mode, call.dtype, call.memory()),
        # Peers store to the output directly: symmetric memory that this rank grants to them.
        taking_output(_output_bytes(layout, call.dtype.itemsize), shape, call.dtype),
        lambda output, y: prepare(call, output.destination),
        kept,
        where=destination_of,
        with_libraries=False,
    )


def run_backward(
    call: EmbeddingCall, grad: torch.Tensor, target: backward.Target
) -> DeferredCall | Sorted | None:
    """Send the gradients of this rank's samples to the owners of their tables, which apply them."""
    if call.group.spans_nodes:
        return gradients_between_nodes.run(call, grad.contiguous(), target)
    if target.values is None:
        return backward.update(call, grad.contiguous(), target)
    return backward.run(call, grad.contiguous(), target)


def prepare(call: EmbeddingCall, destination: Destination) -> Launch:
    """Prepare the forward launch, into a buffer of the output. Collective when the workspace must
    grow.
    """
    group, layout, config = call.group, call.layout, call.config
    if layout.world_size == 1:
        return pooling.prepare(call, destination.address)
    require(group.backend)
    from interlace.operators.embedding_all_to_all.kernels.forward import (
        embedding_all_to_all_forward,
    )

    tasks = len(call.weights) * ceil_div(layout.chunk, config.block_bags) * layout.world_size
    programs = max(1, min(tasks, config.max_programs))
    workspace = group.workspace(*_SIGNALS)
    arguments, constants = pooling.arguments(call)
    arguments |= {
        "buffers": destination.address,
        "grants": workspace.data.address,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(OPERATOR),
        "call": call.mark,
        "buffer_bytes": destination.buffer_bytes,
        "buffer_index": destination.own_index,
        "chunk": layout.chunk,
        "drawn_tasks": pooling.fewest_tasks(call, tasks),
    }
    constants["WORLD_SIZE"] = layout.world_size
    return Launch(embedding_all_to_all_forward, (programs,), arguments, constants)
