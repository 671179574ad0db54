"""Cost of ``gemm_reduce_scatter``: parts of ``x @ w.T`` are summed over ranks, and every rank gets
its rows of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.gemm import (
    ProductCost,
    ProductSizes,
    RailTraffic,
    leaving,
    rail_traffic,
    takes_sizes,
)
from interlace.costs.registry import cost_of


@cost_of("gemm_reduce_scatter", computation="GEMM", collective="reduce_scatter")
@takes_sizes
def fused(
    sizes: ProductSizes,
    *,
    part_itemsize: int | None = None,
    rank: int = 0,
    splits: Sequence[int] | None = None,
) -> ProductCost:
    """Compute the cost of ``rank`` for ``x [rows, inner]`` and ``w [columns, inner]``.

    Every rank stores each of its parts in the slot that the part's owner keeps for this rank; the
    owner adds the slots.

    Args:
        sizes: ``inner`` is this rank's share of K.
        part_itemsize: bytes of an element of a part; the result's by default.
        splits: rows that each rank owns; evenly split by default.
    """
    ranks = sizes.world_size
    row_bytes = sizes.columns * (part_itemsize or sizes.output_itemsize)
    size = sizes.rows * row_bytes
    if splits is None:
        slots, sums, sent = size, sizes.output_bytes // ranks, leaving(size, ranks)
    else:
        slots = ranks * splits[rank] * row_bytes
        sums = splits[rank] * sizes.columns * sizes.output_itemsize
        sent = (sizes.rows - splits[rank]) * row_bytes
    # Parts are written to the slots instead of to the output, at the parts' element size. A group
    # of one rank needs no slots to be added.
    received = slots + sums if ranks > 1 else 0
    return ProductCost(sizes.flops, sizes.operand_bytes + slots, sent, received, size)


def between_nodes(
    *, rows: int, row_bytes: int, slices: int, nodes: int, node_ranks: int
) -> RailTraffic:
    """Count what a rank sends between nodes with ``impl="chunked"``.

    The sums of its node go to the ranks of its rail that own the rows. Within the node, parts go to
    the rank whose rail that is.

    Args:
        rows: rows of the product, of which each rank owns as many.
        row_bytes: bytes of a row of the product.
        slices: number of slices of the rows for one rank.
        nodes: number of nodes.
        node_ranks: number of ranks of each node.
    """
    share = rows // (nodes * node_ranks)
    return rail_traffic(
        rows=share, row_bytes=row_bytes, slices=slices, nodes=nodes, node_ranks=node_ranks
    )
