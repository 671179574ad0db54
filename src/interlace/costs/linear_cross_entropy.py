"""Cost of ``linear_cross_entropy`` per rank."""

from __future__ import annotations

from interlace.costs.registry import Cost, cost_of
from interlace.units import ceil_div

ROW_BYTES = 32
"""Bytes that a rank tells of a row: four numbers, each in a packed word."""


@cost_of("linear_cross_entropy", computation="loss", collective="all_reduce")
def forward(
    *,
    rows: int,
    hidden: int,
    columns: int,
    itemsize: int,
    world_size: int,
    chunk_rows: int,
    trains: bool = False,
) -> Cost:
    """Compute the cost of the fused loss on one rank, without the sum of x's gradient over ranks,
    which is that of a ``gemm_all_reduce`` or ``gemm_reduce_scatter``.

    Args:
        rows: Rows of all ranks.
        columns: This rank's columns of the vocabulary.
        chunk_rows: Rows whose logits are stored at a time.
        trains: Whether the gradients of x and w are computed, too.
    """
    chunks = ceil_div(rows, chunk_rows)
    logits, weight, peers = rows * columns, columns * hidden, world_size - 1
    # Each chunk reads the weight; logits are written once and read by the kernel of their losses.
    elements = rows * hidden + chunks * weight + 2 * logits
    if trains:
        # They are read again, overwritten by their gradients, and these read by two products. The
        # gradient of w is read for each chunk but the first, and written for each.
        elements += 4 * logits + 2 * rows * hidden + (3 * chunks - 1) * weight
    return Cost(
        flops=2 * rows * columns * hidden * (3 if trains else 1),
        memory_bytes=elements * itemsize + world_size * rows * ROW_BYTES,
        link_bytes=peers * rows * ROW_BYTES,
        messages=peers * rows,
        signals=0,
    )
