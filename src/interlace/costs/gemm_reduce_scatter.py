"""Cost of ``gemm_reduce_scatter``: parts of ``x @ w.T`` are summed over ranks, and every rank gets
its rows of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.gemm import ProductCost, leaving, operand_bytes
from interlace.costs.registry import cost_of


@cost_of("gemm_reduce_scatter", computation="GEMM", collective="reduce_scatter")
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
    """Compute the cost of ``rank`` for ``x [rows, inner]`` and ``w [columns, inner]``.

    Every rank stores each of its parts in the slot that the part's owner keeps for this rank; the
    owner adds the slots.

    Args:
        inner: this rank's share of K.
        itemsize: bytes of an element of x and w.
        output_itemsize: bytes of an element of the result; ``itemsize`` by default.
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
    # Parts are written to the slots instead of to the output, at the parts' element size. A group
    # of one rank needs no slots to be added.
    memory_bytes = operand_bytes(rows, columns, inner, itemsize) + slots
    return ProductCost(
        2 * rows * columns * inner, memory_bytes, sent, slots + sums if world_size > 1 else 0, size
    )
