"""``impl="chunked"`` of batches of products in groups that span nodes.

A batch's rows for one peer, or from it, are one piece of memory, product after product. A slice is
a part of that piece, which may begin and end within a product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from interlace.gemm.batch import BatchCall
from interlace.gemm.implementations.network import (
    counters_of,
    cut,
    cut_all,
    exchanging,
    peers_in_turn,
    run_products,
    send_products,
    slice_count,
    steps_of,
)
from interlace.mapped.stamped import Landing


def run_all_to_all(call: BatchCall) -> torch.Tensor:
    """Multiply the peers' rows of ``x [B, M, K]`` slice by slice, this rank's own last, and send
    each slice. Collective in the group's first call.

    Returns:
        The rows of all products that all ranks have computed for this one, ``[B M, N]``.
    """
    ranks, (count, _, columns) = call.group.world_size, call.w.shape
    x = call.x.unflatten(1, (ranks, -1))
    share = x.shape[2]

    def multiply(rank: int, out: torch.Tensor, first: int) -> None:
        for products, part, begin, end in _pieces(out, first, share):
            torch.bmm(x[products, rank, begin:end], call.w[products], out=part)

    y = call.x.new_empty([ranks * count * share, columns])
    send_products(call, [[count * share] * ranks] * ranks, y, multiply)
    return y


def run_products_of_arrivals(call: BatchCall) -> tuple[torch.Tensor, torch.Tensor]:
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
    slices = slice_count(call, "chunked", count * share, inner * x.element_size())
    peers = peers_in_turn(group)
    landing = {peer: torch.empty_like(x[0]) for peer in peers}
    # Slices are voided one by one, as they are waited for.
    landings = [Landing(peer, 0, 0) for peer in peers]
    counters = counters_of(call, 1)

    def multiply(source: int, rows: torch.Tensor, first: int) -> None:
        """Multiply rows of one rank, from its row ``first`` on, and put them in their places."""
        for products, part, begin, end in _pieces(rows, first, share):
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


def _pieces(
    rows: torch.Tensor, first: int, share: int
) -> Iterator[tuple[slice, torch.Tensor, int, int]]:
    """Cut a slice of a rank's rows, ``share`` of each product, into batches of equal rows.

    Args:
        rows: The slice, contiguous.
        first: The row at which it begins.
        share: Rows of one product.

    Yields:
        The products, their part of ``rows`` as ``[products, rows, columns]``, and the rows of each
        product, from the first to before the last one.
    """
    at, end = first, first + len(rows)
    while at < end:
        product, begin = divmod(at, share)
        # Whole products go together; a slice may begin and end with a part of one.
        whole = 1 if begin else max(1, (end - at) // share)
        last = min(share, begin + end - at)
        part = rows[at - first : at - first + whole * (last - begin)]
        yield slice(product, product + whole), part.unflatten(0, (whole, -1)), begin, last
        at += whole * (last - begin)
