"""Cost of ``linear_top_k`` per rank."""

from __future__ import annotations

from interlace.costs.registry import Cost, cost_of

CANDIDATE_BYTES = 16
"""Bytes of a candidate: a value and a column, each in a packed word."""


@cost_of("linear_top_k", computation="choice", collective="all_gather")
def choice(
    *, rows: int, hidden: int, columns: int, itemsize: int, world_size: int, k: int = 1
) -> Cost:
    """Compute the cost of the product and of the exchange of candidates on one rank.

    Args:
        columns: This rank's columns of the vocabulary.
        k: Candidates of each row.
    """
    peers = world_size - 1
    # Logits are written, and read by what finds the candidates.
    elements = rows * hidden + columns * hidden + 2 * rows * columns
    return Cost(
        flops=2 * rows * columns * hidden,
        memory_bytes=elements * itemsize + world_size * rows * k * CANDIDATE_BYTES,
        link_bytes=peers * rows * k * CANDIDATE_BYTES,
        messages=peers * rows,
        signals=0,
    )
