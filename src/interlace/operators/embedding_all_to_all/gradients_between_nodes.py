"""The backward pass in groups that span nodes: gradients travel while lookups are sorted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm.slices import Message, Step
from interlace.mapped.stamped import Landing, StampedQueue
from interlace.operators.embedding_all_to_all.config import OPERATOR
from interlace.operators.embedding_all_to_all.launch import Call
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.operators.embedding_all_to_all.lookups import Sorted, sort_lookups


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
    layout, rank = call.layout, call.rank
    width = layout.rank_columns[rank]
    received = grad.new_empty(layout.batch, width)
    peers = [(rank + step) % layout.world_size for step in range(1, layout.world_size)]
    if not layout.batch or not layout.columns:
        return received, sort_lookups(call, rows, run_lookups), None
    staged = _pack(layout, grad, peers)
    own_samples = slice(rank * layout.chunk, rank * layout.chunk + layout.samples(rank))
    first = layout.first_column(rank)
    landings = [
        Landing(peer, peer * layout.chunk * width, layout.samples(peer) * width) for peer in peers
    ]
    steps = [_step(layout, peers, staged, received)]
    queue = StampedQueue(call.group, f"{OPERATOR}.backward", mark, steps, landings, received)
    with call.group.running():
        received[own_samples].copy_(grad[:, first : first + width])
        queue.open()
        queue.release()
        try:
            # The sort depends on indices alone and takes about as long as the exchange.
            lookups = sort_lookups(call, rows, run_lookups)
        except BaseException:
            queue.abandon()
            raise
        is_valid = queue.close()
    return received, lookups, is_valid


def _pack(layout: Layout, grad: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
    """Return each peer's columns of the gradients, ``[samples, columns of the peer]``, as bytes."""
    staged = []
    for peer in peers:
        first, width = layout.first_column(peer), layout.rank_columns[peer]
        part = grad[:, first : first + width].contiguous()
        staged.append(part.view(-1).view(torch.uint8))
    return staged


def _step(
    layout: Layout, peers: Sequence[int], staged: Sequence[torch.Tensor], received: torch.Tensor
) -> Step:
    """Return the exchange of gradients, which waits for no counter."""
    departures = [
        Message(peer, part) for peer, part in zip(peers, staged, strict=True) if part.numel()
    ]
    arrivals = []
    for peer in peers:
        first = peer * layout.chunk
        part = received[first : first + layout.samples(peer)]
        if part.numel():
            arrivals.append(Message(peer, part.view(-1).view(torch.uint8)))
    return Step((), tuple(departures), tuple(arrivals))
