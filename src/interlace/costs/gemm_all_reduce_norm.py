"""Cost of ``gemm_all_reduce_norm``: every rank sends its part of the sum to all, and normalises."""

from __future__ import annotations

from interlace.costs.gemm import ProductCost, ProductSizes, takes_sizes
from interlace.costs.registry import cost_of

WORD_BYTES = 8
"""Bytes of the packed word by which a rank tells a peer which call it is in."""


@cost_of("gemm_all_reduce_norm", computation="GEMM", collective="all_reduce")
@takes_sizes
def fused(sizes: ProductSizes, *, part_itemsize: int | None = None) -> ProductCost:
    """Compute the cost of one rank.

    Args:
        sizes: ``inner`` is this rank's share of K; ``output_itemsize`` is that of the residual.
        part_itemsize: Bytes of an element of a part that travels: 4 from the fused kernel, and the
            residual's (the default) of rows that cuBLAS has computed.
    """
    peers = sizes.world_size - 1
    elements = sizes.rows * sizes.columns
    part_bytes = elements * (part_itemsize or sizes.output_itemsize)
    return ProductCost(
        flops=sizes.flops,
        memory_bytes=sizes.operand_bytes + sizes.output_bytes + peers * part_bytes,
        link_bytes=peers * (part_bytes + WORD_BYTES),
        # All parts are read; the residual is read and written, and the norm written.
        receive_bytes=peers * part_bytes + 3 * sizes.output_bytes,
        size=sizes.output_bytes,
    )
