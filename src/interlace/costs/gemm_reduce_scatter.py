"""Cost of ``gemm_reduce_scatter``: parts of ``x @ w.T`` are summed over ranks, and every rank gets
its rows of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.cost import NetworkCost
from interlace.costs.gemm import ProductCost, ProductSizes, leaving, rail_cost, takes_sizes
from interlace.costs.registry import cost_of, network_cost_of


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
        part_itemsize: Bytes of an element of a part; the result's by default.
        splits: Rows that each rank owns; evenly split by default.
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


@network_cost_of("gemm_reduce_scatter", "chunked")
@takes_sizes
def chunked_between_nodes(
    sizes: ProductSizes, *, node_of_rank: Sequence[int], slices: int, **_: object
) -> NetworkCost:
    """Return the traffic between nodes of an even call in two levels.

    The sums of a node go to the ranks of the rail that own the rows. Rows that this node's ranks
    own are multiplied last, and the nodes' sums are added once they have arrived.
    """
    nodes, share = len(set(node_of_rank)), sizes.rows // sizes.world_size
    row_bytes = sizes.columns * sizes.output_itemsize
    return rail_cost(
        rows=share,
        row_bytes=row_bytes,
        slices=slices,
        node_of_rank=node_of_rank,
        remote_share=(nodes - 1) / nodes,
        landing_bytes=(nodes + 1) * share * row_bytes,
    )
