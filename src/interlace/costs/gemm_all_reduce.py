"""What ``gemm_all_reduce`` computes and moves: parts of ``x @ w.T``, summed over ranks, the sum on every rank."""

from __future__ import annotations

from interlace.costs import gemm_reduce_scatter
from interlace.costs.gemm import ProductCost, leaving


def fused(*, rows: int, columns: int, inner: int, itemsize: int, world_size: int, part_itemsize: int | None = None) -> ProductCost:
    """Cost of one rank, in two phases: as ``gemm_reduce_scatter``, then the owner's sums to everyone.

    Args:
        inner: the rank's share of K.
        part_itemsize: bytes of an element of a part; the output's by default.
    """
    first = gemm_reduce_scatter.fused(
        rows=rows, columns=columns, inner=inner, itemsize=itemsize, world_size=world_size, part_itemsize=part_itemsize
    )
    output = rows * columns * itemsize
    others = output - output // world_size
    return ProductCost(
        first.flops,
        first.memory_bytes,
        first.link_bytes + leaving(output, world_size),
        first.receive_bytes + others if world_size > 1 else 0,
        first.size,
    )
