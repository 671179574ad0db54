"""Cost of ``gemm_all_to_all``: every row of ``x @ w.T`` goes to the rank that owns it."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.gemm import ProductCost, ProductSizes, leaving, takes_sizes
from interlace.costs.registry import cost_of


@cost_of("gemm_all_to_all", computation="GEMM", collective="all_to_all")
@takes_sizes
def fused(
    sizes: ProductSizes,
    *,
    rank: int = 0,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> ProductCost:
    """Compute the cost of ``rank`` for ``x [rows, inner]`` and ``w [columns, inner]``.

    The rank writes its own rows into its result, and the peers write theirs: the result is written
    once in all.

    Args:
        sizes: ``rows`` are those of this rank's x.
        input_splits: rows that ``rank`` sends to each rank; evenly split by default.
        output_splits: rows that ``rank`` gets from each rank; evenly split by default.
    """
    row_bytes = sizes.columns * sizes.output_itemsize
    received = sizes.rows if output_splits is None else sum(output_splits)
    # An even split need not divide the rows; its shares are rounded up.
    sent = (
        leaving(sizes.output_bytes, sizes.world_size)
        if input_splits is None
        else (sizes.rows - input_splits[rank]) * row_bytes
    )
    memory_bytes = sizes.operand_bytes + received * row_bytes
    return ProductCost(sizes.flops, memory_bytes, sent, 0, sizes.output_bytes)
