"""Cost of ``embedding_all_to_all`` per rank, forward and backward.

In all functions ``widths[r][t]`` is the width of rank r's table t, and ``batch`` counts the samples
of all ranks. Every rank owns a chunk of ``ceil(batch / ranks)`` samples; the last chunks may be
smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from interlace.costs.registry import (
    Cost,
    NetworkCost,
    cost_of,
)
from interlace.units import ceil_div, round_up

Widths = Sequence[Sequence[int]]

STAMP_BYTES = 16
"""Bytes behind a slice between nodes, by which its receiver knows the call; slices are padded to as
many.
"""

SLICES_OF_VECTORS = ((1,), (1, 3), (1, 1), (1, 2, 2, 2), (1,) * 4, (1,) * 8, (1,) * 16)
"""Relative sizes of the slices that pooled vectors may leave in between nodes, the fewest first.

A small first slice leaves early, while the network has nothing else to do, and networks carry large
slices faster than small ones. So of two cuts that are predicted to take about as long, the one with
the small slice comes first.
"""

POOLING_FACTOR = 0.8
"""The time of our kernel, as a fraction of that of a copy of as many bytes: rows are only read.

From committed measurements on H200s: 0.75 to 0.83 with eight lookups and more in tables that the L2
does not hold.
"""

GRANT_BYTES = 4
"""Bytes of the buffer number that a rank grants to each rank that sends to it."""


def samples(batch: int, world_size: int) -> list[int]:
    """Count the samples that each rank owns."""
    chunk = ceil_div(batch, world_size)
    return [max(0, min(chunk, batch - rank * chunk)) for rank in range(world_size)]


def cut_tables(widths: Sequence[int], count: int) -> list[int]:
    """Cut a rank's tables into slices of about as many columns, in order.

    Args:
        widths: Width of each table.
        count: Number of slices; some have no tables if there are fewer tables.

    Returns:
        The first table of each slice, and the number of tables.
    """
    # A table belongs to the slice that its middle column is in.
    middles = [
        2 * end - width for end, width in zip(itertools.accumulate(widths), widths, strict=True)
    ]
    limits = [2 * sum(widths) * number for number in range(count)]
    return [sum(middle * count < limit for middle in middles) for limit in limits] + [len(widths)]


def floor_link_bytes(*, widths: Widths, batch: int, rank: int, itemsize: int) -> int:
    """Count the bytes of pooled vectors that must leave ``rank``: those of the peers' samples."""
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
    """Count the bytes that ``rank``'s memory must move in the forward pass.

    A row is read once per lookup, indices and offsets are read once, and this rank's output is
    written once, most of it by its peers.

    Args:
        lookups: Number of lookups in each of ``rank``'s tables.
        itemsize: Bytes of an element of the tables.
        output_itemsize: Bytes of an element of the output.
        index_itemsize: Bytes of an index and of an offset.
    """
    rows = sum(count * width * itemsize for count, width in zip(lookups, widths[rank], strict=True))
    numbers = index_itemsize * (sum(lookups) + len(widths[rank]) * batch + 1)
    written = samples(batch, len(widths))[rank] * sum(map(sum, widths)) * output_itemsize
    return rows + numbers + written


@cost_of("embedding_all_to_all", computation="embedding", collective="all_to_all")
def forward(
    *,
    rank: int,
    widths: Widths,
    batch: int,
    lookups: Sequence[int],
    itemsize: int,
    output_itemsize: int,
    index_itemsize: int,
    block_bags: int,
    slice_blocks: int,
    impl: str = "fused",
    weighted: bool = False,
    node_of_rank: Sequence[int] = (),
) -> Cost:
    """Compute the cost of the forward pass on ``rank``.

    Args:
        lookups: Number of lookups in each of ``rank``'s tables.
        itemsize: Bytes of an element of the tables.
        output_itemsize: Bytes of an element of the output.
        index_itemsize: Bytes of an index and of an offset.
        block_bags: Bags per block; a block is one put.
        slice_blocks: Blocks per slice between nodes; a slice is one message with the blocks of all
            tables.
        impl: ``"fused"``; or ``"pooled"`` for the kernel without peers and torch's all-to-all,
            whose messages are counted as they reach it.
        weighted: Whether lookups have weights, which cost one more operation per element.
        node_of_rank: Number of each rank's node in a group that spans nodes; else empty.
    """
    sizes = samples(batch, len(widths))
    pooled = sum(count * width for count, width in zip(lookups, widths[rank], strict=True))
    memory_bytes = floor_memory_bytes(
        widths=widths, batch=batch, rank=rank, lookups=lookups,
        itemsize=itemsize, output_itemsize=output_itemsize, index_itemsize=index_itemsize,
    )  # fmt: skip
    flops = (2 if weighted else 1) * pooled
    peers = len(widths) - 1
    # Without samples or tables no kernel is launched.
    if not batch or not any(map(sum, widths)):
        return Cost(0, 0, 0, 0, 0)
    tables = len(widths[rank])
    if impl == "pooled":
        row_bytes = sum(widths[rank]) * output_itemsize
        sent = {peer: size * row_bytes for peer, size in enumerate(sizes) if peer != rank}
        far_bytes = [
            nbytes
            for peer, nbytes in sent.items()
            if nbytes and node_of_rank and node_of_rank[peer] != node_of_rank[rank]
        ]
        # All vectors are written and read before the exchange, and all that have come after it.
        received = sizes[rank] * sum(map(sum, widths)) * output_itemsize
        return Cost(
            flops,
            memory_bytes + 2 * batch * row_bytes + 2 * received,
            sum(sent.values()),
            sum(map(bool, sent.values())),
            0,
            sum(far_bytes),
            len(far_bytes),
        )
    if node_of_rank:
        node = node_of_rank[rank]
        near = [r for r in range(len(widths)) if node_of_rank[r] == node and r != rank]
        far = [r for r in range(len(widths)) if node_of_rank[r] != node]
        puts = sum(tables * ceil_div(sizes[r], block_bags) for r in near)
        node_bytes = sum(sizes[r] for r in near) * sum(widths[rank]) * output_itemsize
        row_bytes, full = sum(widths[rank]) * output_itemsize, block_bags * slice_blocks
        slices = [nbytes for r in far for nbytes in slices_of(sizes[r], row_bytes, full, full)]
        # What travels is staged, written and read, and what has come is copied to its place.
        received = sizes[rank] * sum(sum(widths[r]) for r in far) * output_itemsize
        return Cost(
            flops,
            memory_bytes + 2 * sum(slices) + 2 * received,
            node_bytes + len(near) * GRANT_BYTES + sum(slices),
            len(near) + puts + len(slices),
            2 * len(near),
            sum(slices),
            len(slices),
        )
    remote = [size for peer, size in enumerate(sizes) if peer != rank]
    # A put is a block of one table's bags for one peer.
    puts = sum(tables * ceil_div(size, block_bags) for size in remote)
    link_bytes = (
        floor_link_bytes(widths=widths, batch=batch, rank=rank, itemsize=output_itemsize)
        + peers * GRANT_BYTES
    )
    # Each peer is told of its grant, and that all its vectors have been put.
    return Cost(flops, memory_bytes, link_bytes, peers + puts, 2 * peers)


def pooling_us(memory_bytes: float, launch_us: float, copied_bytes_per_s: float) -> float:
    """Return the microseconds that our kernel takes to pool the tables of one rank.

    Args:
        memory_bytes: Bytes that it reads and writes, as of :func:`floor_memory_bytes`.
        launch_us: Time of a kernel that does nothing.
        copied_bytes_per_s: Rate at which memory is read and written by copies.
    """
    return launch_us + POOLING_FACTOR * 1e6 * memory_bytes / copied_bytes_per_s


def stock_pooling_us(
    memory_bytes: float, launch_us: float, copied_bytes_per_s: float, itemsize: int
) -> float:
    """Return the microseconds that ``F.embedding_bag`` takes for each of the tables of one rank.

    From committed measurements on H200s: of 128 float16 elements a row 3.3 times as long as a copy
    of as many bytes, of 256 float32 elements 1.9 times.

    Args:
        memory_bytes: Bytes that our kernel reads and writes.
        launch_us: Time of a kernel that does nothing.
        copied_bytes_per_s: Rate at which memory is read and written by copies.
        itemsize: Bytes of an element of the tables.
    """
    factor = 3.3 if itemsize <= 2 else 1.9
    return factor * (launch_us + 1e6 * memory_bytes / copied_bytes_per_s)


def fused_between_nodes(
    *,
    rank: int,
    widths: Widths,
    batch: int,
    output_itemsize: int,
    node_of_rank: Sequence[int],
    shares: Sequence[int],
    **_: object,
) -> NetworkCost:
    """Return the traffic between nodes of pooled vectors that leave in slices.

    The samples of this rank's node are pooled last, and what has arrived is copied to its columns.

    Args:
        shares: Relative sizes of the slices, one of :data:`SLICES_OF_VECTORS`.
    """
    sizes, ranks = samples(batch, len(widths)), range(len(widths))
    far = [r for r in ranks if node_of_rank[r] != node_of_rank[rank]]
    row_bytes = sum(widths[rank]) * output_itemsize
    unit = max(1, ceil_div(max(sizes), sum(shares)))
    first, further = shares[0] * unit, shares[-1] * unit
    sent = [nbytes for r in far for nbytes in slices_of(sizes[r], row_bytes, first, further)]
    received = sizes[rank] * sum(sum(widths[r]) for r in far) * output_itemsize
    remote_share = sum(sizes[r] for r in far) / max(1, batch)
    return NetworkCost(sum(sent), len(sent), len(shares), remote_share, 2 * received, tuple(shares))


def stock_between_nodes(
    *, rank: int, widths: Widths, batch: int, output_itemsize: int, node_of_rank: Sequence[int]
) -> NetworkCost:
    """Return the traffic between nodes of ``"pooled"`` and of the stock pair: one all-to-all, then
    the columns of all ranks are put side by side.
    """
    sizes = samples(batch, len(widths))
    far = [r for r, node in enumerate(node_of_rank) if node != node_of_rank[rank]]
    row_bytes = sum(widths[rank]) * output_itemsize
    received = sizes[rank] * sum(map(sum, widths)) * output_itemsize
    sent = sum(sizes[r] for r in far) * row_bytes
    return NetworkCost(sent, len(far), landing_bytes=2 * received)


def slices_of(count: int, row_bytes: int, first: int, further: int) -> list[int]:
    """Return the bytes of each slice that one rank sends to another one of another node.

    Args:
        count: Samples of the destination.
        row_bytes: Bytes of a sample's vectors of all tables of the source.
        first: Samples of the first slice, if it is full.
        further: Samples of every other full slice.
    """
    bounds = [0, *range(first, count, further), count] if count else []
    full = [end - begin for begin, end in itertools.pairwise(bounds)]
    return [round_up(rows * row_bytes, STAMP_BYTES) + STAMP_BYTES for rows in full if row_bytes]


def backward_floor_link_bytes(*, widths: Widths, batch: int, rank: int, itemsize: int) -> int:
    """Count the gradient bytes that must leave ``rank``: its samples' columns of peers' tables."""
    return (
        samples(batch, len(widths))[rank] * (sum(map(sum, widths)) - sum(widths[rank])) * itemsize
    )


def backward_floor_memory_bytes(
    *, widths: Widths, batch: int, rank: int, distinct_rows: Sequence[int], lookups: Sequence[int],
    itemsize: int, gradient_itemsize: int, row_accesses: int, state_bytes: int,
) -> int:  # fmt: skip
    """Count the bytes that ``rank``'s memory must move in the backward pass.

    Gradients are read once by the rank that has them and written once by the rank that they reach,
    and then read once by their table's owner: all lookups of a table use the gradients of one set
    of samples, which fit a cache. Each lookup's row number and each distinct row count as well.

    Args:
        distinct_rows: Number of distinct rows that were looked up in each of ``rank``'s tables.
        lookups: Number of lookups in each of ``rank``'s tables.
        row_accesses: Accesses per row: 1 for a gradient that is written, 2 for an update in place.
        state_bytes: Bytes of optimizer state moved per distinct row: 8 for row-wise Adagrad.
    """
    local_width = sum(widths[rank])
    owned = samples(batch, len(widths))[rank]
    travelled = owned * (sum(map(sum, widths)) - local_width) + (batch - owned) * local_width
    rows = sum(
        count * (row_accesses * width * itemsize + state_bytes)
        for count, width in zip(distinct_rows, widths[rank], strict=True)
    )
    # Each lookup's row number has 4 bytes.
    return gradient_itemsize * (travelled + batch * local_width) + 4 * sum(lookups) + rows


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
    node_of_rank: Sequence[int] = (),
    slices: int = 1,
) -> Cost:
    """Compute the cost of the fused backward kernel on ``rank``.

    The sort of the row numbers before the kernel is not counted.

    Args:
        lookups: Number of lookups in each of ``rank``'s tables.
        distinct_rows: Number of distinct rows that were looked up in each of ``rank``'s tables.
        itemsize: Bytes of an element of the tables.
        gradient_itemsize: Bytes of an element of the output's gradient.
        push_rows: Samples of one table that one put sends.
        row_accesses: Accesses per row: 1 for a gradient that is written, 2 for an update in place.
        state_bytes: Bytes of optimizer state moved per distinct row: 8 for row-wise Adagrad.
        node_of_rank: Number of each rank's node in a group that spans nodes, where each peer gets
            its gradients in slices, and a stamp; else empty.
        slices: Number of these slices, each of some of the peer's tables.
    """
    if not batch or not any(map(sum, widths)):
        return Cost(0, 0, 0, 0, 0)
    peers = len(widths) - 1
    tables = sum(len(theirs) for peer, theirs in enumerate(widths) if peer != rank)
    memory_bytes = backward_floor_memory_bytes(
        widths=widths, batch=batch, rank=rank, distinct_rows=distinct_rows, lookups=lookups,
        itemsize=itemsize, gradient_itemsize=gradient_itemsize, row_accesses=row_accesses,
        state_bytes=state_bytes,
    )  # fmt: skip
    flops = sum(count * width for count, width in zip(lookups, widths[rank], strict=True))
    if node_of_rank:
        owned = samples(batch, len(widths))[rank] * gradient_itemsize
        sent = {peer: owned * sum(theirs) for peer, theirs in enumerate(widths) if peer != rank}
        messages = {
            peer: 1 + sum(1 for first, last in itertools.pairwise(cut_tables(widths[peer], slices))
                          if owned * sum(widths[peer][first:last]))
            for peer in sent
        }  # fmt: skip
        far = [peer for peer in sent if node_of_rank[peer] != node_of_rank[rank]]
        return Cost(
            flops,
            memory_bytes + 2 * sum(sent.values()),
            sum(sent.values()) + peers * STAMP_BYTES,
            sum(messages.values()),
            0,
            sum(sent[peer] for peer in far) + len(far) * STAMP_BYTES,
            sum(messages[peer] for peer in far),
        )
    return Cost(
        flops=flops,
        memory_bytes=memory_bytes,
        link_bytes=backward_floor_link_bytes(
            widths=widths, batch=batch, rank=rank, itemsize=gradient_itemsize
        ),
        messages=tables * ceil_div(samples(batch, len(widths))[rank], push_rows),
        signals=peers + tables,
    )
