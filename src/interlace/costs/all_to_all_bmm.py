"""What ``all_to_all_bmm`` computes and moves: a batch of products of rows that come from all ranks."""

from __future__ import annotations

from interlace.costs.gemm import ProductCost, leaving, operand_bytes
from interlace.units import round_up


def fused(
    *, batch: int, rows: int, columns: int, inner: int, itemsize: int, world_size: int
) -> ProductCost:
    """Cost of one rank: ``x [rows, inner]`` and ``w [inner, columns]`` of each product, rows from
    all ranks in equal parts.

    The peers' rows are written here before the products read them, each with the padding that
    brings it to 16 bytes.

    Args:
        rows: of one product.
    """
    size = batch * rows * round_up(inner * itemsize, 16)
    moved = leaving(size, world_size)
    memory_bytes = (
        batch * (operand_bytes(rows, columns, inner, itemsize) + rows * columns * itemsize) + moved
    )
    return ProductCost(2 * batch * rows * columns * inner, memory_bytes, moved, 0, size)
