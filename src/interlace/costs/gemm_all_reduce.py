"""What ``gemm_all_reduce`` computes and moves: parts of ``x @ w.T``, summed over ranks, the sum on
every rank.
"""

from __future__ import annotations

from interlace.costs import gemm_reduce_scatter
from interlace.costs.gemm import ProductCost, leaving


def fused(
    *,
    rows: int,
    columns: int,
    inner: int,
    itemsize: int,
    world_size: int,
    output_itemsize: int | None = None,
    part_itemsize: int | None = None,
) -> ProductCost:
    """Cost of one rank, in two phases: as ``gemm_reduce_scatter``, then the owner's sums to
    everyone.

    Args:
        inner: the rank's share of K.
        itemsize, output_itemsize: bytes of an element of x and w, and of the result; the same by
            default.
        part_itemsize: bytes of an element of a part; the result's by default.
    """
    first = gemm_reduce_scatter.fused(
        rows=rows, columns=columns, inner=inner, itemsize=itemsize, world_size=world_size,
        output_itemsize=output_itemsize, part_itemsize=part_itemsize,
    )  # fmt: skip
    output = rows * columns * (output_itemsize or itemsize)
    others = output - output // world_size
    return ProductCost(
        first.flops,
        first.memory_bytes,
        first.link_bytes + leaving(output, world_size),
        first.receive_bytes + others if world_size > 1 else 0,
        first.size,
    )
