"""What ``gemm_all_to_all`` computes and moves: rows of ``x @ w.T`` go to the rank that owns them."""

from __future__ import annotations

from interlace.costs.gemm import ProductCost, leaving, product


def fused(*, rows: int, columns: int, inner: int, itemsize: int, world_size: int) -> ProductCost:
    """Cost of one rank: ``x [rows, inner]``, ``w [columns, inner]``, rows split evenly over the ranks.

    A rank writes its own rows here, and its peers as many again: the output is written once in all.
    """
    flops, memory_bytes = product(rows, columns, inner, itemsize)
    size = rows * columns * itemsize
    return ProductCost(flops, memory_bytes, leaving(size, world_size), 0, size)
