"""What ``embedding_all_to_all`` computes and moves, per rank, forward and backward.

``widths`` is every table's width by rank, ``widths[r][t]``; ``batch`` the samples of all ranks,
which own chunks of ``ceil(batch / ranks)``, the last ones smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.cost import Cost
from interlace.units import ceil_div

Widths = Sequence[Sequence[int]]

GRANT_BYTES = 4
"""The number of the buffer that a rank tells each of its sources."""


def samples(batch: int, world_size: int) -> list[int]:
    """Samples that each rank owns."""
    chunk = ceil_div(batch, world_size)
    return [max(0, min(chunk, batch - rank * chunk)) for rank in range(world_size)]


def floor_link_bytes(*, widths: Widths, batch: int, rank: int, itemsize: int) -> int:
    """The pooled vectors that must leave ``rank``: those of the peers' samples."""
    return (batch - samples(batch, len(widths))[rank]) * sum(widths[rank]) * itemsize


def floor_memory_bytes(
    *,
    widths: Widths,
    batch: int,
    rank: int,
    lookups: Sequence[int],
    itemsize: int,
    output_itemsize: int,
    index_itemsize: int,
) -> int:
    """Every looked-up row read once a lookup, indices and offsets read once, and this rank's output
    written once, most of it by its peers.

    Args:
        lookups: of each of ``rank``'s tables.
        itemsize, output_itemsize, index_itemsize: bytes of an element of the tables, the output,
            indices and offsets.
    """
    rows = sum(count * width * itemsize for count, width in zip(lookups, widths[rank], strict=True))
    numbers = index_itemsize * (sum(lookups) + len(widths[rank]) * batch + 1)
    written = samples(batch, len(widths))[rank] * sum(map(sum, widths)) * output_itemsize
    return rows + numbers + written


def forward(
    *,
    protocol: str,
    rank: int,
    widths: Widths,
    batch: int,
    lookups: Sequence[int],
    itemsize: int,
    output_itemsize: int,
    index_itemsize: int,
    block_bags: int,
    slice_blocks: int,
    weighted: bool = False,
) -> Cost:
    """Cost of the fused forward kernel on ``rank``.

    Args:
        protocol: ``"direct"``, ``"tiles"`` or ``"sliced"``.
        block_bags: bags of a block; a block is one put.
        slice_blocks: blocks of a slice; a slice is one signal, under ``"sliced"``.
        weighted: whether lookups have weights.
    """
    sizes = samples(batch, len(widths))
    pooled = sum(count * width for count, width in zip(lookups, widths[rank], strict=True))
    memory_bytes = floor_memory_bytes(
        widths=widths, batch=batch, rank=rank, lookups=lookups,
        itemsize=itemsize, output_itemsize=output_itemsize, index_itemsize=index_itemsize,
    )  # fmt: skip
    flops = (2 if weighted else 1) * pooled
    peers = len(widths) - 1
    if not batch or not any(map(sum, widths)):
        return Cost(0, 0, 0, 0, 0)
    tables = len(widths[rank])
    remote = [size for other, size in enumerate(sizes) if other != rank]
    puts = sum(tables * ceil_div(size, block_bags) for size in remote)
    link_bytes = (
        floor_link_bytes(widths=widths, batch=batch, rank=rank, itemsize=output_itemsize)
        + peers * GRANT_BYTES
    )
    if protocol == "sliced":
        # A slice is written to memory and read again before it leaves.
        memory_bytes += 2 * (link_bytes - peers * GRANT_BYTES)
        signals = sum(tables * ceil_div(size, block_bags * slice_blocks) for size in remote)
    else:
        signals = peers
    return Cost(flops, memory_bytes, link_bytes, peers + puts, peers + signals)


def backward_floor_link_bytes(*, widths: Widths, batch: int, rank: int, itemsize: int) -> int:
    """The gradients that must leave ``rank``: of its samples, all columns but its own tables'."""
    return (
        samples(batch, len(widths))[rank] * (sum(map(sum, widths)) - sum(widths[rank])) * itemsize
    )


def backward_floor_memory_bytes(
    *, widths: Widths, batch: int, rank: int, distinct_rows: Sequence[int], lookups: Sequence[int],
    itemsize: int, gradient_itemsize: int, row_accesses: int, state_bytes: int,
) -> int:  # fmt: skip
    """Gradients read once where they are and written once where they arrive, then read once by
    their table's owner (all lookups of a table use the same samples' gradients, which fit a cache),
    each lookup's number, and each distinct row.

    Args:
        distinct_rows: looked up in each of ``rank``'s tables.
        row_accesses: of one row: 1 for a gradient that is written, 2 for an update in place.
        state_bytes: moved per distinct row beside the row: 8 for row-wise Adagrad.
    """
    own = sum(widths[rank])
    mine = samples(batch, len(widths))[rank]
    travelled = mine * (sum(map(sum, widths)) - own) + (batch - mine) * own
    rows = sum(
        count * (row_accesses * width * itemsize + state_bytes)
        for count, width in zip(distinct_rows, widths[rank], strict=True)
    )
    return gradient_itemsize * (travelled + batch * own) + 4 * sum(lookups) + rows


def backward(
    *,
    rank: int,
    widths: Widths,
    batch: int,
    lookups: Sequence[int],
    distinct_rows: Sequence[int],
    itemsize: int,
    gradient_itemsize: int,
    push_rows: int,
    row_accesses: int = 1,
    state_bytes: int = 0,
) -> Cost:
    """Cost of the fused backward kernel on ``rank``, without the sort of the row numbers before it.

    Args:
        push_rows: samples of one table that one put sends.
    """
    if not batch or not any(map(sum, widths)):
        return Cost(0, 0, 0, 0, 0)
    peers = len(widths) - 1
    mine = samples(batch, len(widths))[rank]
    tables = sum(len(each) for other, each in enumerate(widths) if other != rank)
    memory_bytes = backward_floor_memory_bytes(
        widths=widths, batch=batch, rank=rank, distinct_rows=distinct_rows, lookups=lookups,
        itemsize=itemsize, gradient_itemsize=gradient_itemsize, row_accesses=row_accesses,
        state_bytes=state_bytes,
    )  # fmt: skip
    return Cost(
        flops=sum(count * width for count, width in zip(lookups, widths[rank], strict=True)),
        memory_bytes=memory_bytes,
        link_bytes=backward_floor_link_bytes(
            widths=widths, batch=batch, rank=rank, itemsize=gradient_itemsize
        ),
        messages=tables * ceil_div(mine, push_rows),
        signals=peers + tables,
    )
