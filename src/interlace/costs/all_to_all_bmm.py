"""Cost of ``all_to_all_bmm``: a batch of products whose rows arrive from all ranks."""

from __future__ import annotations

from interlace.costs.gemm import ProductCost, ProductSizes, leaving, takes_sizes
from interlace.costs.registry import cost_of
from interlace.units import round_up


@cost_of(
    "all_to_all_bmm",
    computation="batched GEMM",
    collective="all_to_all",
    collective_first=True,
)
@takes_sizes
def fused(sizes: ProductSizes, *, batch: int) -> ProductCost:
    """Compute the cost of one rank for ``batch`` products of ``x [rows, inner]`` and ``w [inner,
    columns]``.

    Every rank sends an equal part of the rows. The peers' rows are written to this rank's memory
    before the products read them, and travel with the padding that brings each row to a multiple of
    16 bytes.

    Args:
        sizes: those of one product; ``rows`` come from all ranks together.
        batch: number of products.
    """
    # As in all_gather_gemm, rows travel with their padding to 16 bytes.
    size = batch * sizes.rows * round_up(sizes.inner * sizes.itemsize, 16)
    moved = leaving(size, sizes.world_size)
    memory_bytes = batch * (sizes.operand_bytes + sizes.output_bytes) + moved
    return ProductCost(batch * sizes.flops, memory_bytes, moved, 0, size)
