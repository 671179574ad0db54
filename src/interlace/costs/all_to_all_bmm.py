"""Cost of ``all_to_all_bmm``: a batch of products whose rows arrive from all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.cost import NetworkCost
from interlace.costs.gemm import ProductCost, ProductSizes, leaving, takes_sizes
from interlace.costs.gemm_all_to_all import network_traffic
from interlace.costs.registry import cost_of, network_cost_of
from interlace.units import round_up


@cost_of(
    "all_to_all_bmm",
    computation="batched GEMM",
    collective="all_to_all",
    collective_first=True,
)
@takes_sizes
def fused(sizes: ProductSizes, *, batch: int = 1) -> ProductCost:
    """Compute the cost of one rank for ``batch`` products of ``x [rows, inner]`` and ``w [inner,
    columns]``.

    Every rank sends an equal part of the rows. The peers' rows are written to this rank's memory
    before the products read them, and travel with the padding that brings each row to a multiple of
    16 bytes.

    Args:
        sizes: Those of one product; ``rows`` come from all ranks together.
        batch: Number of products.
    """
    # As in all_gather_gemm, rows travel with their padding to 16 bytes.
    size = batch * sizes.rows * round_up(sizes.inner * sizes.itemsize, 16)
    moved = leaving(size, sizes.world_size)
    memory_bytes = batch * (sizes.operand_bytes + sizes.output_bytes) + moved
    return ProductCost(batch * sizes.flops, memory_bytes, moved, 0, size)


@network_cost_of("all_to_all_bmm", "chunked")
@takes_sizes
def chunked_between_nodes(
    sizes: ProductSizes, *, rank: int, node_of_rank: Sequence[int], slices: int
) -> NetworkCost:
    """Return the traffic between nodes of a call whose rows are multiplied slice by slice.

    This rank's own rows are multiplied first: the order of an all-to-all after the products
    backwards, which takes as long. What has arrived is copied to where the products want it. A
    batch counts as one product of all its rows.
    """
    ranks = sizes.world_size
    share, row_bytes = sizes.rows // ranks, sizes.inner * sizes.itemsize
    nbytes, messages = network_traffic(
        rank=rank,
        sent=[[share] * ranks] * ranks,
        row_bytes=row_bytes,
        slices=slices,
        node_of_rank=node_of_rank,
    )
    landed = 2 * (ranks - 1) * share * row_bytes
    return NetworkCost(nbytes, messages, slices, (ranks - 1) / ranks, landed)
