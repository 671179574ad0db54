"""Cost of ``gemv_all_reduce`` per rank."""

from __future__ import annotations

from interlace.costs.registry import Cost, cost_of
from interlace.units import ceil_div

WORD_BYTES = 8
"""Bytes of a packed word: one value of 4 bytes, or two values of 20 bits, and their epoch."""


def floor_memory_bytes(*, tokens: int, rows: int, columns: int, itemsize: int) -> int:
    """Count the bytes that memory must move: weight and x read once, the output written once."""
    return itemsize * (rows * columns + tokens * columns + tokens * rows)


def floor_link_bytes(*, tokens: int, rows: int, itemsize: int, world_size: int) -> int:
    """Count the fewest bytes that leave a rank in any all-reduce of the output in its dtype.

    An all-reduce is at least a reduce-scatter and an all-gather.
    """
    return 2 * tokens * rows * itemsize * (world_size - 1) // world_size


def part_bytes(*, tokens: int, rows: int, itemsize: int) -> int:
    """Count the bytes of one rank's part of the output as packed words.

    A word holds one value, or the values of two tokens where elements have 2 bytes.
    """
    return WORD_BYTES * rows * (ceil_div(tokens, 2) if _paired(tokens, itemsize) else tokens)


def call_bytes(*, tokens: int, itemsize: int) -> int:
    """Count the bytes of the word that tells each peer the call's number.

    Only words that hold pairs need it: they have no room for the whole number.
    """
    return WORD_BYTES if _paired(tokens, itemsize) else 0


def _paired(tokens: int, itemsize: int) -> bool:
    return itemsize == 2 and tokens > 1


@cost_of("gemv_all_reduce", computation="GEMV", collective="all_reduce")
def fused(
    *,
    protocol: str,
    rank: int,
    world_size: int,
    tokens: int,
    rows: int,
    columns: int,
    itemsize: int,
    block_n: int,
    block_tokens: int,
) -> Cost:
    """Compute the cost of the fused kernel on ``rank``.

    Args:
        protocol: ``"one_shot"`` (every rank sends its part to every peer) or ``"two_phase"`` (the
            owner of a row reduces it, and sends the sum to every peer).
        columns: Columns of this rank's shard of the weight, K/R.
        itemsize: Bytes of an element of x, w and y.
        block_n: Rows of a tile.
        block_tokens: Tokens of a tile.
    """
    peers = world_size - 1
    flops = 2 * tokens * rows * columns
    memory_bytes = floor_memory_bytes(tokens=tokens, rows=rows, columns=columns, itemsize=itemsize)
    token_tiles = ceil_div(tokens, block_tokens)
    row_tiles = ceil_div(rows, block_n)
    # An empty result sends nothing.
    if not tokens or not rows:
        return Cost(flops, memory_bytes, 0, 0, 0)
    row_bytes = part_bytes(tokens=tokens, rows=1, itemsize=itemsize)
    # Each peer gets one word with the call's number, if pairs have no room for it.
    link_bytes = peers * call_bytes(tokens=tokens, itemsize=itemsize)
    messages = link_bytes // WORD_BYTES
    if protocol == "one_shot":
        return Cost(
            flops,
            memory_bytes,
            link_bytes + peers * rows * row_bytes,
            messages + peers * token_tiles * row_tiles,
            0,
        )
    # Two phases: a program sends each owner its part of the tile, and each owner sends its sum to
    # every peer.
    owned = ceil_div(block_n, world_size)
    for tile in range(row_tiles):
        tile_rows = min(block_n, rows - tile * block_n)
        for owner in range(world_size):
            # Rows of a tile are split over all ranks, so that every rank reduces some of each tile.
            share = max(0, min(owned, tile_rows - owner * owned))
            # A sum goes to every peer, a part to its owner only.
            copies = peers if owner == rank else 1
            if share:
                link_bytes += copies * share * row_bytes
                messages += copies * token_tiles
    return Cost(flops, memory_bytes, link_bytes, messages, 0)
