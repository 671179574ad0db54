"""Cost of ``bmm_all_to_all``: of each of a batch of products, every rank gets its rows."""

from __future__ import annotations

from interlace.costs.gemm import ProductCost, ProductSizes, leaving, takes_sizes
from interlace.costs.gemm_all_to_all import chunked_between_nodes
from interlace.costs.registry import cost_of, network_cost_of


@cost_of("bmm_all_to_all", computation="batched GEMM", collective="all_to_all")
@takes_sizes
def fused(sizes: ProductSizes, *, batch: int = 1) -> ProductCost:
    """Compute the cost of one rank for ``batch`` products of ``x [rows, inner]`` and ``w [inner,
    columns]``, of whose rows every rank gets an equal part.

    Args:
        sizes: Those of one product.
        batch: Number of products.
    """
    size = batch * sizes.output_bytes
    memory_bytes = batch * sizes.operand_bytes + size
    return ProductCost(batch * sizes.flops, memory_bytes, leaving(size, sizes.world_size), 0, size)


# A batch counts as one product of all its rows.
network_cost_of("bmm_all_to_all", "chunked")(chunked_between_nodes)
