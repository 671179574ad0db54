"""Cost of ``gemm_all_reduce``: parts of ``x @ w.T`` are summed, and every rank gets the sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from interlace.costs import gemm_reduce_scatter
from interlace.costs.cost import NetworkCost
from interlace.costs.gemm import (
    ProductCost,
    ProductSizes,
    exchanges_sums,
    leaving,
    rail_cost,
    takes_sizes,
)
from interlace.costs.registry import cost_of, network_cost_of


@cost_of("gemm_all_reduce", computation="GEMM", collective="all_reduce")
@takes_sizes
def fused(sizes: ProductSizes, *, part_itemsize: int | None = None) -> ProductCost:
    """Compute the cost of one rank, in two phases.

    The first phase is a ``gemm_reduce_scatter``; in the second every owner sends its sums to all
    peers.

    Args:
        sizes: ``inner`` is this rank's share of K.
        part_itemsize: Bytes of an element of a part; the result's by default.
    """
    first = gemm_reduce_scatter.fused(**dataclasses.asdict(sizes), part_itemsize=part_itemsize)
    # The peers write their sums into this rank's output, on top of the reduce-scatter's traffic.
    peer_sums = sizes.output_bytes - sizes.output_bytes // sizes.world_size
    return dataclasses.replace(
        first,
        link_bytes=first.link_bytes + leaving(sizes.output_bytes, sizes.world_size),
        receive_bytes=first.receive_bytes + peer_sums if sizes.world_size > 1 else 0,
    )


@network_cost_of("gemm_all_reduce", "chunked")
@takes_sizes
def chunked_between_nodes(
    sizes: ProductSizes, *, node_of_rank: Sequence[int], slices: int, **_: object
) -> NetworkCost:
    """Return the traffic between nodes of an even call in two levels; see
    :func:`interlace.costs.gemm.exchanges_sums`.

    Args:
        slices: Number of slices of the rows of one exchange.
    """
    nodes = len(set(node_of_rank))
    node_ranks = sizes.world_size // nodes
    row_bytes = sizes.columns * sizes.output_itemsize
    is_direct = exchanges_sums(
        rows=sizes.rows, row_bytes=row_bytes, nodes=nodes, node_ranks=node_ranks
    )
    rows = sizes.rows // (node_ranks if is_direct else sizes.world_size)
    return rail_cost(
        rows=rows,
        row_bytes=row_bytes,
        slices=slices,
        node_of_rank=node_of_rank,
        remote_share=1.0 if is_direct else (nodes - 1) / nodes,
        landing_bytes=(nodes + 1) * rows * row_bytes,
        exchanges=1 if is_direct else 2,
    )
