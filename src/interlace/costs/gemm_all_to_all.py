"""What ``gemm_all_to_all`` computes and moves: rows of ``x @ w.T`` go to the rank that owns them."""

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
    rank: int = 0,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> ProductCost:
    """Cost of ``rank``: ``x [rows, inner]``, ``w [columns, inner]``.

    A rank writes its own rows here, and its peers theirs: the result is written once in all.

    Args:
        itemsize, output_itemsize: bytes of an element of x and w, and of the result; the same by
            default.
        input_splits, output_splits: rows from ``rank`` to each rank, and from each rank to it;
            evenly split by default.
    """
    row_bytes = columns * (output_itemsize or itemsize)
    received = rows if output_splits is None else sum(output_splits)
    sent = (
        leaving(rows * row_bytes, world_size)
        if input_splits is None
        else (rows - input_splits[rank]) * row_bytes
    )
    memory_bytes = operand_bytes(rows, columns, inner, itemsize) + received * row_bytes
    return ProductCost(2 * rows * columns * inner, memory_bytes, sent, 0, rows * row_bytes)
