"""What ``all_gather_gemm`` computes and moves: ``x``'s rows, gathered from all ranks, times this rank's ``w``."""

from __future__ import annotations

from interlace.costs.gemm import ProductCost, leaving, product


def fused(*, rows: int, columns: int, inner: int, itemsize: int, world_size: int) -> ProductCost:
    """Cost of one rank: ``x [rows, inner]`` in all, ``rows / world_size`` of them here; ``w [columns, inner]`` here.

    The peers' rows are written here before the product reads them.
    """
    flops, memory_bytes = product(rows, columns, inner, itemsize)
    size = rows * inner * itemsize
    received = leaving(size, world_size)
    return ProductCost(flops, memory_bytes + received, received, 0, size)
