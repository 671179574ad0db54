"""Cost of ``gemm_all_reduce``: parts of ``x @ w.T`` are summed, and every rank gets the sum."""

from __future__ import annotations

from interlace.costs import gemm_reduce_scatter
from interlace.costs.gemm import ProductCost, leaving
from interlace.costs.registry import cost_of


@cost_of("gemm_all_reduce", computation="GEMM", collective="all_reduce")
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
    """Compute the cost of one rank, in two phases.

    The first phase is a ``gemm_reduce_scatter``; in the second every owner sends its sums to all
    peers.

    Args:
        inner: this rank's share of K.
        itemsize: bytes of an element of x and w.
        output_itemsize: bytes of an element of the result; ``itemsize`` by default.
        part_itemsize: bytes of an element of a part; the result's by default.
    """
    first = gemm_reduce_scatter.fused(
        rows=rows, columns=columns, inner=inner, itemsize=itemsize, world_size=world_size,
        output_itemsize=output_itemsize, part_itemsize=part_itemsize,
    )  # fmt: skip
    output = rows * columns * (output_itemsize or itemsize)
    # The peers write their sums into this rank's output, on top of the reduce-scatter's traffic.
    peer_sums = output - output // world_size
    return ProductCost(
        first.flops,
        first.memory_bytes,
        first.link_bytes + leaving(output, world_size),
        first.receive_bytes + peer_sums if world_size > 1 else 0,
        first.size,
    )
