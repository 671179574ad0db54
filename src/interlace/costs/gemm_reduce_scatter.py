"""What ``gemm_reduce_scatter`` computes and moves: parts of ``x @ w.T``, summed over ranks, rows
split over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.gemm import ProductCost, leaving, operand_bytes


def fused(
    *,
    rows: int,
    columns: int,
    inner: int,
    itemsize: int,
    world_size: int,
    output_itemsize: int | None = None,
    part_itemsize: int | None = None,
    rank: int = 0,
    splits: Sequence[int] | None = None,
) -> ProductCost:
    """Cost of ``rank``: ``x [rows, inner]``, ``w [columns, inner]`` with ``inner`` the rank's share
    of K.

    Every rank stores each part in its owner's slot for it; the owner adds the slots.

    Args:
        itemsize, output_itemsize: bytes of an element of x and w, and of the result; the same by
            default.
        part_itemsize: bytes of an element of a part; the result's by default.
        splits: rows that each rank owns; evenly split by default.
    """
    output = output_itemsize or itemsize
    part = part_itemsize or output
    size = rows * columns * part
    if splits is None:
        slots, sums, sent = size, rows * columns * output // world_size, leaving(size, world_size)
    else:
        owned = splits[rank] * columns
        slots, sums, sent = (
            world_size * owned * part,
            owned * output,
            (rows - splits[rank]) * columns * part,
        )
    # Parts are written instead of the output
    memory_bytes = operand_bytes(rows, columns, inner, itemsize) + slots
    return ProductCost(
        2 * rows * columns * inner, memory_bytes, sent, slots + sums if world_size > 1 else 0, size
    )
