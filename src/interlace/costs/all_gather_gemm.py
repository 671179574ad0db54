"""Cost of ``all_gather_gemm``: ``x`` is gathered from all ranks, then multiplied by ``w``."""

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
        splits: rows of x on each rank; evenly split by default.
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


def between_nodes(
    *, rows: int, row_bytes: int, slices: int, nodes: int, node_ranks: int
) -> RailTraffic:
    """Count what a rank sends between nodes with ``impl="chunked"``.

    Its rows go to every rank of its rail. Within the node it passes on these rows, and what has
    arrived.

    Args:
        rows: rows of x on all ranks together, as many on each.
        row_bytes: bytes of a row of x.
        slices: number of slices of the rows for one rank.
        nodes: number of nodes.
        node_ranks: number of ranks of each node.
    """
    share = rows // (nodes * node_ranks)
    return rail_traffic(
        rows=share, row_bytes=row_bytes, slices=slices, nodes=nodes, node_ranks=node_ranks
    )
