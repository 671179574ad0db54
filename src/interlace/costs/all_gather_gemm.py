"""Cost of ``all_gather_gemm``: ``x`` is gathered from all ranks, then multiplied by ``w``."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.gemm import ProductCost, leaving, operand_bytes
from interlace.costs.registry import cost_of
from interlace.units import round_up


@cost_of("all_gather_gemm", computation="GEMM", collective="all_gather", collective_first=True)
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
    """Compute the cost of ``rank`` for the gathered ``x [rows, inner]`` and its own ``w [columns,
    inner]``.

    The peers' rows are written to this rank's memory before the product reads them. Every row
    travels with the padding that brings it to a multiple of 16 bytes.

    Args:
        rows: rows of x on all ranks together.
        itemsize: bytes of an element of x and w.
        output_itemsize: bytes of an element of the result; ``itemsize`` by default.
        splits: rows of x on each rank; evenly split by default.
    """
    # Rows travel with their padding, so the padded row counts on links and in the buffer.
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
