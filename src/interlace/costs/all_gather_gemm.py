"""Cost of ``all_gather_gemm``: ``x`` is gathered from all ranks, then multiplied by ``w``."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.cost import NetworkCost
from interlace.costs.gemm import ProductCost, ProductSizes, leaving, rail_cost, takes_sizes
from interlace.costs.registry import cost_of, network_cost_of
from interlace.units import round_up


@cost_of("all_gather_gemm", computation="GEMM", collective="all_gather", collective_first=True)
@takes_sizes
def fused(
    sizes: ProductSizes, *, rank: int = 0, splits: Sequence[int] | None = None
) -> ProductCost:
    """Compute the cost of ``rank`` for the gathered ``x [rows, inner]`` and its own ``w [columns,
    inner]``.

    The peers' rows are written to this rank's memory before the product reads them. Every row
    travels with the padding that brings it to a multiple of 16 bytes.

    Args:
        sizes: ``rows`` are those of x on all ranks together.
        splits: Rows of x on each rank; evenly split by default.
    """
    # Rows travel with their padding, so the padded row counts on links and in the buffer.
    row_bytes = round_up(sizes.inner * sizes.itemsize, 16)
    gathered_bytes = sizes.rows * row_bytes
    if splits is None:
        received = sent = leaving(gathered_bytes, sizes.world_size)
    else:
        received = (sizes.rows - splits[rank]) * row_bytes
        sent = (sizes.world_size - 1) * splits[rank] * row_bytes
    memory_bytes = sizes.operand_bytes + sizes.output_bytes + received
    return ProductCost(sizes.flops, memory_bytes, sent, 0, gathered_bytes)


@network_cost_of("all_gather_gemm", "chunked")
@takes_sizes
def chunked_between_nodes(
    sizes: ProductSizes, *, node_of_rank: Sequence[int], slices: int, **_: object
) -> NetworkCost:
    """Return the traffic between nodes of an even call in two levels.

    Each rank's rows go to every other rank of its rail. The rows of this node's ranks are
    multiplied first, and those of others slice by slice: the order of a reduce-scatter backwards,
    which takes as long.
    """
    nodes = len(set(node_of_rank))
    return rail_cost(
        rows=sizes.rows // sizes.world_size,
        row_bytes=sizes.inner * sizes.itemsize,
        slices=slices,
        node_of_rank=node_of_rank,
        remote_share=(nodes - 1) / nodes,
    )
