"""What ``gemv_all_reduce`` computes and moves, per rank."""

from __future__ import annotations

from interlace.costs.cost import Cost
from interlace.units import ceil_div

WORD_BYTES = 8
"""A packed word: a float32 and its epoch."""


def floor_memory_bytes(*, tokens: int, rows: int, columns: int, itemsize: int) -> int:
    """The weight and x read once, the output written once."""
    return itemsize * (rows * columns + tokens * columns + tokens * rows)


def floor_link_bytes(*, tokens: int, rows: int, itemsize: int, world_size: int) -> int:
    """The least bytes that must leave a rank in any all-reduce of the output in its dtype (reduce-scatter, all-gather)."""
    return 2 * tokens * rows * itemsize * (world_size - 1) // world_size


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
    programs: int,
) -> Cost:
    """Cost of the fused kernel on ``rank``.

    Args:
        protocol: ``"one_shot"`` or ``"two_phase"``.
        columns: of this rank's shard, K/R.
        itemsize: bytes of an element of x, w and y.
        block_n, block_tokens: rows and tokens of a tile.
        programs: of the launch; each takes the tiles congruent to its index.
    """
    peers = world_size - 1
    flops = 2 * tokens * rows * columns
    memory_bytes = floor_memory_bytes(tokens=tokens, rows=rows, columns=columns, itemsize=itemsize)
    token_tiles = ceil_div(tokens, block_tokens)
    row_tiles = ceil_div(rows, block_n)
    tiles = token_tiles * row_tiles if tokens and rows else 0
    if protocol == "one_shot":
        return Cost(flops, memory_bytes, peers * tokens * rows * WORD_BYTES, peers * tiles, 0)
    owned = ceil_div(block_n, world_size)
    link_bytes = messages = 0
    for tile in range(row_tiles):
        here = min(block_n, rows - tile * block_n)
        for owner in range(world_size):
            share = max(0, min(owned, here - owner * owned))  # rows of this tile that the owner reduces
            if not share:
                continue
            if owner == rank:
                link_bytes += peers * share * tokens * itemsize  # the sum, to everyone
                messages += peers * token_tiles
            else:
                link_bytes += share * tokens * 4  # a float32 part, to the owner
                messages += token_tiles
    return Cost(flops, memory_bytes, link_bytes, messages, 2 * programs * peers if tiles else 0)
