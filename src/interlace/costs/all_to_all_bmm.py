"""Cost of ``all_to_all_bmm``: a batch of products whose rows arrive from all ranks."""

from __future__ import annotations

from interlace.costs.gemm import ProductCost, leaving, operand_bytes
from interlace.costs.registry import cost_of
from interlace.units import round_up


@cost_of(
    "all_to_all_bmm",
    computation="batched GEMM",
    collective="all_to_all",
    collective_first=True,
)
def fused(
    *, batch: int, rows: int, columns: int, inner: int, itemsize: int, world_size: int
) -> ProductCost:
    """Compute the cost of one rank for ``batch`` products of ``x [rows, inner]`` and ``w [inner,
    columns]``.

    Every rank sends an equal part of the rows. The peers' rows are written to this rank's memory
    before the products read them, and travel with the padding that brings each row to a multiple of
    16 bytes.

    Args:
        batch: number of products.
        rows: rows of one product, from all ranks together.
        itemsize: bytes of an element of x, w and the result.
    """
    # As in all_gather_gemm, rows travel with their padding to 16 bytes.
    size = batch * rows * round_up(inner * itemsize, 16)
    moved = leaving(size, world_size)
    memory_bytes = (
        batch * (operand_bytes(rows, columns, inner, itemsize) + rows * columns * itemsize) + moved
    )
    return ProductCost(2 * batch * rows * columns * inner, memory_bytes, moved, 0, size)
