"""What ``all_gather_gemm`` computes and moves: ``x``'s rows, gathered from all ranks, times this
rank's ``w``.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.gemm import ProductCost, leaving, operand_bytes
from interlace.units import round_up


def fused(
    *,
    rows: int,
    columns: int,
    inner: int,
    itemsize: int,
    world_size: int,
    output_itemsize: int | None = None,
    rank: int = 0,
    splits: Sequence[int] | None = None,
) -> ProductCost:
    """Cost of ``rank``: ``x [rows, inner]`` in all, its share of them here; ``w [columns, inner]``
    here.

    The peers' rows are written here before the product reads them, each with the padding that
    brings it to 16 bytes.

    Args:
        itemsize, output_itemsize: bytes of an element of x and w, and of the result; the same by
            default.
        splits: rows of x on each rank; evenly split by default.
    """
    row_bytes = round_up(inner * itemsize, 16)
    if splits is None:
        received = sent = leaving(rows * row_bytes, world_size)
    else:
        received, sent = (
            (rows - splits[rank]) * row_bytes,
            (world_size - 1) * splits[rank] * row_bytes,
        )
    output = rows * columns * (output_itemsize or itemsize)
    memory_bytes = operand_bytes(rows, columns, inner, itemsize) + output + received
    return ProductCost(2 * rows * columns * inner, memory_bytes, sent, 0, rows * row_bytes)
