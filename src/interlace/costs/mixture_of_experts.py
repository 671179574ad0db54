"""What ``mixture_of_experts`` computes and moves, per rank, forward and backward.

``counts[s][e]`` is the number of rows that rank s sends to expert e, dropped ones left out; rank r
has the experts from ``r L`` to ``(r + 1) L - 1``.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.cost import Cost
from interlace.units import ceil_div

Counts = Sequence[Sequence[int]]

NUMBER_BYTES = 4
"""A count, the number of a granted buffer, a slot's weight or that weight's gradient."""


def arrivals(counts: Counts, rank: int) -> int:
    """Rows of ``rank``'s experts, from all ranks."""
    return sum(sum(source[expert] for expert in _local(counts, rank)) for source in counts)


def leaving(counts: Counts, rank: int) -> int:
    """Rows that ``rank`` sends to others' experts; as many results come back from there."""
    return sum(counts[rank]) - sum(counts[rank][expert] for expert in _local(counts, rank))


def returning(counts: Counts, rank: int) -> int:
    """Rows of ``rank``'s experts that came from others."""
    return arrivals(counts, rank) - sum(counts[rank][expert] for expert in _local(counts, rank))


def floor_link_bytes(*, counts: Counts, rank: int, hidden: int, itemsize: int) -> int:
    """Rows that must leave ``rank``, in one direction: tokens for others' experts, and results of
    others' tokens.
    """
    return (leaving(counts, rank) + returning(counts, rank)) * hidden * itemsize


def flops(*, counts: Counts, rank: int, hidden: int, ffn: int) -> int:
    """Of an expert's three products with ``hidden x ffn`` numbers each, for its rows; the backward
    pass has twice as many.
    """
    return 6 * arrivals(counts, rank) * hidden * ffn


def weight_bytes(*, counts: Counts, rank: int, hidden: int, ffn: int, itemsize: int) -> int:
    """Weights of the experts that have any row, once."""
    busy = sum(any(source[expert] for source in counts) for expert in _local(counts, rank))
    return 3 * busy * hidden * ffn * itemsize


def floor_memory_bytes(
    *, counts: Counts, rank: int, tokens: int, hidden: int, ffn: int, itemsize: int, trains: bool
) -> int:
    """Weights read once; tokens read, written where they arrive and read there; the inner layer
    written and read; results written where they come back, and read there; y written.

    Args:
        trains: gate and up are written too.
    """
    rows, back = arrivals(counts, rank), sum(counts[rank])
    numbers = hidden * (2 * tokens + 2 * rows + 2 * back) + ffn * rows * (4 if trains else 2)
    return (
        weight_bytes(counts=counts, rank=rank, hidden=hidden, ffn=ffn, itemsize=itemsize)
        + numbers * itemsize
    )


def backward_memory_bytes(
    *, counts: Counts, rank: int, tokens: int, hidden: int, ffn: int, itemsize: int
) -> int:
    """What the forward pass moves of tokens and results, here their gradients, which are read
    twice; weights read, and their gradients written; tokens that arrived, gate and up read again;
    of the inner layer, the product, the gradients of gate and up (twice read) and the weighted
    activation.
    """
    rows, back = arrivals(counts, rank), sum(counts[rank])
    weights = weight_bytes(counts=counts, rank=rank, hidden=hidden, ffn=ffn, itemsize=itemsize)
    written = 3 * len(_local(counts, rank)) * hidden * ffn * itemsize
    return (
        weights
        + written
        + itemsize * (hidden * (2 * tokens + 4 * rows + 2 * back) + ffn * rows * 12)
    )


def forward(
    *, counts: Counts, rank: int, tokens: int, hidden: int, ffn: int, itemsize: int,
    push_tile: tuple[int, int], product_tile: tuple[int, int], trains: bool = False,
) -> Cost:  # fmt: skip
    """Cost of the fused forward kernels on ``rank``.

    Where products store by tensor descriptors, tiles go out whole, and up to a tile's rows more
    travel for each source and expert; that is not counted here.

    Args:
        push_tile: rows and columns of tokens that one put sends.
        product_tile: rows and columns of results.
    """
    peers, row_bytes = len(counts) - 1, hidden * itemsize
    sent = _pushes(counts, rank, push_tile[0]) * ceil_div(hidden, push_tile[1])
    results = _puts(counts, rank, product_tile[0]) * ceil_div(hidden, product_tile[1])
    numbers = NUMBER_BYTES * (len(counts[0]) + 1)
    return Cost(
        flops=flops(counts=counts, rank=rank, hidden=hidden, ffn=ffn),
        memory_bytes=floor_memory_bytes(
            counts=counts,
            rank=rank,
            tokens=tokens,
            hidden=hidden,
            ffn=ffn,
            itemsize=itemsize,
            trains=trains,
        ),
        link_bytes=peers * numbers + (leaving(counts, rank) + returning(counts, rank)) * row_bytes,
        messages=2 * peers + sent + results,
        signals=2 * peers + _busy_elsewhere(counts, rank),
    )


def backward(
    *, counts: Counts, rank: int, tokens: int, hidden: int, ffn: int, itemsize: int,
    push_tile: tuple[int, int], product_tile: tuple[int, int], number_rows: int,
) -> Cost:  # fmt: skip
    """Cost of the fused backward kernels on ``rank``; as :func:`forward`.

    Args:
        number_rows: rows whose weights' gradients one put sends.
    """
    peers, row_bytes = len(counts) - 1, hidden * itemsize + NUMBER_BYTES
    sent = _pushes(counts, rank, push_tile[0]) * (ceil_div(hidden, push_tile[1]) + 1)
    results = _puts(counts, rank, product_tile[0]) * ceil_div(hidden, product_tile[1])
    return Cost(
        flops=2 * flops(counts=counts, rank=rank, hidden=hidden, ffn=ffn),
        memory_bytes=backward_memory_bytes(
            counts=counts, rank=rank, tokens=tokens, hidden=hidden, ffn=ffn, itemsize=itemsize
        ),
        link_bytes=(leaving(counts, rank) + returning(counts, rank)) * row_bytes,
        messages=sent + results + _puts(counts, rank, number_rows),
        signals=2 * peers + _busy_elsewhere(counts, rank),
    )


def _local(counts: Counts, rank: int) -> range:
    each = len(counts[0]) // len(counts)
    return range(rank * each, (rank + 1) * each)


def _busy_elsewhere(counts: Counts, rank: int) -> int:
    """Others' experts to which ``rank`` sends rows."""
    mine = _local(counts, rank)
    return sum(count > 0 and expert not in mine for expert, count in enumerate(counts[rank]))


def _pushes(counts: Counts, rank: int, rows: int) -> int:
    """Blocks of ``rows`` that ``rank`` sends to others' experts."""
    mine = _local(counts, rank)
    return sum(
        ceil_div(count, rows) for expert, count in enumerate(counts[rank]) if expert not in mine
    )


def _puts(counts: Counts, rank: int, rows: int) -> int:
    """Others' shares of the blocks of ``rows`` into which each of ``rank``'s experts cuts its rows,
    source by source.
    """
    found = 0
    for expert in _local(counts, rank):
        begin = 0
        for source, each in enumerate(counts):
            end = begin + each[expert]
            if source != rank and end > begin:
                found += (end - 1) // rows - begin // rows + 1
            begin = end
    return found
