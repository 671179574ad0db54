"""The backward pass in groups that span nodes: gradients travel while lookups are sorted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm import Group
from interlace.comm.constants import on_device
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, triton_dtype
from interlace.comm.slices import Message, SliceQueue, Step
from interlace.operators.embedding_all_to_all import record
from interlace.operators.embedding_all_to_all.config import OPERATOR
from interlace.operators.embedding_all_to_all.launch import Call
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.operators.embedding_all_to_all.lookups import Sorted, sort_lookups

_NAME = f"{OPERATOR}.backward_between_nodes"
_STAMP_BYTES = 16


def exchange(
    call: Call, grad: torch.Tensor, rows: Sequence[int], run_lookups: int, mark: int
) -> tuple[torch.Tensor, Sorted, torch.Tensor | None]:
    """Send every owner its columns of ``grad`` while this rank's lookups are sorted. Collective.

    Each rank sends one message per peer, ranks of its own node included, and the stamp of its call
    ahead of it. If a peer is late or makes another call, gradients are NaN.

    Args:
        call: The call.
        grad: Contiguous gradients of this rank's samples, ``[samples, columns]``.
        rows: Rows of each of this rank's tables.
        run_lookups: Largest number of lookups in a run.
        mark: The number that the ranks' agreement returned for the backward pass.

    Returns:
        The gradients of this rank's tables, ``[batch, columns of this rank]``; its lookups in the
        order of their rows; and int32 ``[1]`` on the device: 1, or 0 if gradients must not be
        applied (None if there are none).
    """
    group, layout, rank = call.group, call.layout, call.rank
    width = layout.rank_columns[rank]
    received = grad.new_empty(layout.batch, width)
    peers = [(rank + step) % layout.world_size for step in range(1, layout.world_size)]
    if not layout.batch or not layout.columns:
        return received, sort_lookups(call, rows, run_lookups), None
    require(group.backend)
    staged = _pack(layout, grad, peers)
    stamps = torch.empty(2, len(peers), _STAMP_BYTES, dtype=torch.uint8, device=grad.device)
    mine = slice(rank * layout.chunk, rank * layout.chunk + layout.samples(rank))
    first = layout.first_column(rank)
    stamp, check, is_valid = prepare(group, call, peers, stamps, received, mark)
    with group.running():
        received[mine].copy_(grad[:, first : first + width])
        queue = SliceQueue(group, OPERATOR, _steps(layout, peers, staged, stamps, received), mark)
        stamp()
        queue.arm()
        queue.release()
        try:
            # The sort depends on indices alone and takes about as long as the exchange.
            lookups = sort_lookups(call, rows, run_lookups)
        except BaseException:
            queue.disarm()
            raise
        queue.join()
        check()
    return received, lookups, is_valid


def _pack(layout: Layout, grad: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
    """Return each peer's columns of the gradients, ``[samples, columns of the peer]``, as bytes."""
    staged = []
    for peer in peers:
        first, width = layout.first_column(peer), layout.rank_columns[peer]
        part = grad[:, first : first + width].contiguous()
        staged.append(part.view(-1).view(torch.uint8))
    return staged


def _steps(
    layout: Layout,
    peers: Sequence[int],
    staged: Sequence[torch.Tensor],
    stamps: torch.Tensor,
    received: torch.Tensor,
) -> list[Step]:
    """Return the exchange of stamps, and that of gradients."""
    sent = [Message(peer, stamps[0, i]) for i, peer in enumerate(peers)]
    awaited = [Message(peer, stamps[1, i]) for i, peer in enumerate(peers)]
    departures = [
        Message(peer, part) for peer, part in zip(peers, staged, strict=True) if part.numel()
    ]
    arrivals = []
    for peer in peers:
        first = peer * layout.chunk
        part = received[first : first + layout.samples(peer)]
        if part.numel():
            arrivals.append(Message(peer, part.view(-1).view(torch.uint8)))
    return [
        Step((), tuple(sent), tuple(awaited)),
        Step((), tuple(departures), tuple(arrivals)),
    ]


def prepare(
    group: Group,
    call: Call,
    peers: Sequence[int],
    stamps: torch.Tensor,
    received: torch.Tensor,
    mark: int,
) -> tuple[Launch, Launch, torch.Tensor]:
    """Prepare the launches before and after the exchange, and the int32 that the second one sets.

    Collective when the workspace must grow.
    """
    from interlace.operators.embedding_all_to_all.kernels.between_nodes import (
        embedding_all_to_all_check,
        embedding_all_to_all_stamp,
    )

    layout, width = call.layout, call.layout.rank_columns[call.rank]
    epochs = group.workspace(_NAME, 4096, record.HEADER).epochs
    shared = {"epochs": epochs, "ctx": group.context(_NAME), "call": mark, "count": len(peers)}
    sources = [
        (peer, peer * layout.chunk * width * call.dtype.itemsize, layout.samples(peer) * width)
        for peer in peers
    ]
    is_valid = torch.ones(1, dtype=torch.int32, device=received.device)
    stamp = Launch(
        embedding_all_to_all_stamp,
        (1,),
        {"stamps": stamps[0].data_ptr(), **shared},
        {"num_warps": 1},
        (stamps,),
    )
    check = Launch(
        embedding_all_to_all_check,
        (1,),
        {
            "sources": on_device(group, sources),
            "stamps": stamps[1].data_ptr(),
            "landing": received.data_ptr(),
            "is_valid": is_valid,
            **shared,
        },
        {"OUT": triton_dtype(call.dtype), "num_warps": 4},
        (stamps, received),
    )
    return stamp, check, is_valid
