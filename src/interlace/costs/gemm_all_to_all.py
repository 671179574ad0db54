"""Cost of ``gemm_all_to_all``: every row of ``x @ w.T`` goes to the rank that owns it."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.gemm import ProductCost, leaving, operand_bytes
from interlace.costs.registry import cost_of


@cost_of("gemm_all_to_all", computation="GEMM", collective="all_to_all")
def fused(
    *,
    rows: int,
    columns: int,
    inner: int,
    itemsize: int,
    world_size: int,
    output_itemsize: int | None = None,
    rank: int = 0,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> ProductCost:
    """Compute the cost of ``rank`` for ``x [rows, inner]`` and ``w [columns, inner]``.

    The rank writes its own rows into its result, and the peers write theirs: the result is written
    once in all.

    Args:
        itemsize: bytes of an element of x and w.
        output_itemsize: bytes of an element of the result; ``itemsize`` by default.
        input_splits: rows that ``rank`` sends to each rank; evenly split by default.
        output_splits: rows that ``rank`` gets from each rank; evenly split by default.
    """
    row_bytes = columns * (output_itemsize or itemsize)
    received = rows if output_splits is None else sum(output_splits)
    # An even split need not divide the rows; its shares are rounded up.
    sent = (
        leaving(rows * row_bytes, world_size)
        if input_splits is None
        else (rows - input_splits[rank]) * row_bytes
    )
    memory_bytes = operand_bytes(rows, columns, inner, itemsize) + received * row_bytes
    return ProductCost(2 * rows * columns * inner, memory_bytes, sent, 0, rows * row_bytes)
