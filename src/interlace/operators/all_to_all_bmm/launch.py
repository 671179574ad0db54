"""The launches of ``all_to_all_bmm``: copies or stores of the peers' rows, then ``torch.bmm``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch

from interlace.comm import Group, process_group_named
from interlace.comm.groups import copies
from interlace.comm.replay.replays import places
from interlace.comm.runtime.interpreter import require
from interlace.gemm import fetch, few_rows, invariance
from interlace.gemm.batch import BatchCall
from interlace.gemm.fetch import OwnRows, Piece, Staging
from interlace.gemm.implementations.network import (
    counters_of,
    cut,
    cut_all,
    exchanging,
    peers_in_turn,
    pieces_of_batch,
    run_products,
    slice_count,
    steps_of,
)
from interlace.gemm.implementations.pushed import push_rows
from interlace.gemm.launch import padded_columns
from interlace.gemm.operands import contiguous_dimension
from interlace.gemm.reference import exchange_rows
from interlace.mapped.stamped import Landing

NAME = "all_to_all_bmm"

Pair = tuple[torch.Tensor, torch.Tensor]


def run_pushed(call: BatchCall) -> Pair:
    """Let one kernel store all rows where they are multiplied, then multiply."""
    if call.is_batch_invariant:
        call = dataclasses.replace(call, w=_for_our_kernel(call.w))
    x, y, received = _operands(call)
    w, group, inner = call.w, call.group, x.shape[1]
    ranks = group.world_size
    share = received.shape[1] // ranks
    rows = [len(w) * share] * ranks
    # Before anything is enqueued: the workspace may have to grow.
    push = push_rows(group, NAME, x, received, rows, call.mark, share=share, distance=ranks * share)

    def enqueue() -> None:
        push()
        _multiply(received[..., :inner], w, y, call.is_batch_invariant)

    impl = "pushed, batch-invariant" if call.is_batch_invariant else "pushed"
    return _run(call, impl, x, y, received, enqueue, is_copied=False)


def multiplied(x: torch.Tensor, w: torch.Tensor, is_batch_invariant: bool) -> torch.Tensor:
    """Return the products of ``x [B, M, K]`` and ``w [B, K, N]`` on one rank, as a call does."""
    if not is_batch_invariant:
        return torch.bmm(x, w)
    y = x.new_empty([*x.shape[:2], w.shape[2]])
    _multiply(x, _for_our_kernel(w), y, is_batch_invariant)
    return y


def _for_our_kernel(w: torch.Tensor) -> torch.Tensor:
    """Return ``w [B, K, N]`` as our own kernel takes it: contiguous along K or N."""
    return w.contiguous() if contiguous_dimension(w[0]) is None else w


def _multiply(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, is_batch_invariant: bool) -> None:
    """Multiply ``x [B, M, K]`` by ``w [B, K, N]`` into ``y``.

    cuBLAS adds up in another order for another number of rows, so batch-invariant calls multiply by
    a kernel of our own, one matrix after another.
    """
    if not is_batch_invariant:
        torch.bmm(x, w, out=y)
        return
    config = None
    if not invariance.has_one_arithmetic(x.device, x.dtype):
        # Tiles must not follow the number of rows where they may change bits.
        reference = x.new_empty([invariance.REFERENCE_ROWS, x.shape[2]])
        along_k = contiguous_dimension(w[0].T) == 1
        config = few_rows.default_config(
            reference, w.shape[2], along_k=along_k, by_matrix_unit=True
        )
    for rows, weight, result in zip(x, w, y, strict=True):
        few_rows.multiply(rows, [weight.T], [None], [result], config, is_batch_invariant=True)


def run_chunked(call: BatchCall) -> Pair:
    """Multiply this rank's own rows while copy engines, or the network, bring the peers', and then
    those.
    """
    if call.group.spans_nodes:
        return _run_between_nodes(call)
    x, y, received = _operands(call)
    staging = Staging(NAME, len(x), x.shape[1], x.dtype)
    # Before anything is enqueued: the workspace may have to grow.
    staging.workspace(call.group)
    return _run(
        call,
        "chunked",
        x,
        y,
        received,
        lambda: _fetch(x, call.w, y, received, staging, call.group, call.mark),
        is_copied=True,
    )


def _run_between_nodes(call: BatchCall) -> Pair:
    """Send rows of ``x [R B C, K]`` to all ranks, and multiply them slice by slice as they arrive,
    this rank's own first. Collective in the group's first call.

    Returns:
        The products ``[B, R C, N]``, and the rows ``[B, R C, K]``.
    """
    group, w = call.group, call.w
    ranks, rank, (count, inner, columns) = group.world_size, group.rank, w.shape
    x = call.x.contiguous().view(ranks, -1, inner)
    share = x.shape[1] // count
    y = x.new_empty([count, ranks, share, columns])
    received = x.new_empty([count, ranks, share, inner])
    slices = slice_count(call, count * share, inner * x.element_size())
    peers = peers_in_turn(group)
    landing = {peer: torch.empty_like(x[0]) for peer in peers}
    # Slices are voided one by one, as they are waited for.
    landings = [Landing(peer, 0, 0) for peer in peers]
    counters = counters_of(call, 1)

    def multiply(source: int, rows: torch.Tensor, first: int) -> None:
        """Multiply rows of one rank, from its row ``first`` on, and put them in their places."""
        for products, part, begin, end in pieces_of_batch(rows, first, share):
            received[products, source, begin:end].copy_(part)
            torch.bmm(part, w[products], out=y[products, source, begin:end])

    def enqueue() -> None:
        arriving = cut_all(landing, slices)
        steps = steps_of({peer: cut(x[peer], slices) for peer in peers}, arriving, None)
        with exchanging(call, steps, counters, landings, y) as queue:
            queue.release(1)
            own = cut(x[rank], slices)
            firsts = list(itertools.accumulate(map(len, own[:-1]), initial=0))
            for number, first in enumerate(firsts):
                multiply(rank, own[number], first)
                queue.release(number + 2)
            for number, first in enumerate(firsts):
                queue.wait(number)
                for peer in peers:
                    multiply(peer, arriving[peer][number], first)

    run_products(call, slices, enqueue, x, y, received, *landing.values())
    return y.flatten(1, 2), received.flatten(1, 2)


def run_unfused(call: BatchCall) -> Pair:
    """Exchange all rows by torch, then multiply."""
    call.group.check()
    (count, inner, _), ranks = call.w.shape, call.group.world_size
    even = [len(call.x) // ranks] * ranks
    rows = exchange_rows(call.x, even, even, process_group_named(call.group_name))
    received = rows.view(ranks, count, -1, inner).transpose(0, 1).reshape(count, -1, inner)
    return torch.bmm(received, call.w), received


def _operands(call: BatchCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x with contiguous rows, and memory for the products and for all rows, ``[B, R C, N]``
    and ``[B, R C, padded K]``.
    """
    require(call.group.backend)
    x = call.x if call.x.stride(1) == 1 else call.x.contiguous()
    count, inner, columns = call.w.shape
    rows = x.shape[0] // count
    y = x.new_empty([count, rows, columns])
    return x, y, x.new_empty([count, rows, padded_columns(inner, x.dtype)])


def _run(
    call: BatchCall,
    impl: str,
    x: torch.Tensor,
    y: torch.Tensor,
    received: torch.Tensor,
    enqueue: Callable[[], None],
    *,
    is_copied: bool,
) -> Pair:
    """Enqueue a call, or replay it; ``is_copied`` if copy engines write to ``received``."""
    with call.group.running():
        # Marks come again after many calls, so the mark alone does not tell implementations apart.
        key = (NAME, impl, call.mark, places(x, call.w, y, received))
        call.group.replays.run(key, enqueue, copied=[received] if is_copied else ())
    return y, received[..., : x.shape[1]].contiguous()


def _fetch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    received: torch.Tensor,
    staging: Staging,
    group: Group,
    mark: int,
) -> None:
    """Enqueue the products of this rank's own rows, beside copies of the peers', and then those."""
    ranks, me, count, inner = group.world_size, group.rank, len(w), x.shape[1]
    share = received.shape[1] // ranks
    share_bytes = share * staging.row_bytes

    def address_of(source: int) -> int:
        """Return where rows of ``source`` begin; those for the next product follow ``ranks`` shares
        later.
        """
        return received.data_ptr() + source * share_bytes

    offset, distance = me * count * share_bytes, ranks * share_bytes
    pieces = {
        source: [Piece(offset, address_of(source), share_bytes, count, distance)]
        for source in ((me + step) % ranks for step in range(1, ranks))
    }
    own_rows = OwnRows(
        me * count * share, count * share, address_of(me), share, ranks * share, staged=False
    )
    arrivals = fetch.begin(
        group, staging, x, None, received, pieces, mark, own_rows=own_rows, signal=False
    )
    arriving = received.view(count, ranks, share, -1)[..., :inner]
    results = y.view(count, ranks, share, -1)
    torch.bmm(x.view(ranks, count, share, inner)[me], w, out=results[:, me])
    # Rows that lie side by side are one product: a product for each source would have a last wave
    # of tiles for each.
    for sources in (slice(me + 1, ranks), slice(0, me)):
        for source in range(ranks)[sources]:
            copies.wait_for(group, arrivals[source])
        if sources.stop > sources.start:
            torch.bmm(arriving[:, sources].flatten(1, 2), w, out=results[:, sources].flatten(1, 2))
    fetch.settle(group, staging, y, mark)
    fetch.end(group)
