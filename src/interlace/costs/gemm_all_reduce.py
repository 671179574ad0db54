"""Cost of ``gemm_all_reduce``: parts of ``x @ w.T`` are summed, and every rank gets the sum."""

from __future__ import annotations

import dataclasses

from interlace.costs import gemm_reduce_scatter
from interlace.costs.gemm import ProductCost, ProductSizes, leaving, takes_sizes
from interlace.costs.registry import cost_of


@cost_of("gemm_all_reduce", computation="GEMM", collective="all_reduce")
@takes_sizes
def fused(sizes: ProductSizes, *, part_itemsize: int | None = None) -> ProductCost:
    """Compute the cost of one rank, in two phases.

    The first phase is a ``gemm_reduce_scatter``; in the second every owner sends its sums to all
    peers.

    Args:
        sizes: ``inner`` is this rank's share of K.
        part_itemsize: bytes of an element of a part; the result's by default.
    """
    first = gemm_reduce_scatter.fused(**dataclasses.asdict(sizes), part_itemsize=part_itemsize)
    # The peers write their sums into this rank's output, on top of the reduce-scatter's traffic.
    peer_sums = sizes.output_bytes - sizes.output_bytes // sizes.world_size
    return dataclasses.replace(
        first,
        link_bytes=first.link_bytes + leaving(sizes.output_bytes, sizes.world_size),
        receive_bytes=first.receive_bytes + peer_sums if sizes.world_size > 1 else 0,
    )
