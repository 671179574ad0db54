"""Costs of the two operators of Ulysses' sequence parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.gemm import ProductCost, ProductSizes, takes_sizes
from interlace.costs.registry import cost_of


@cost_of("gemm_all_to_all_columns", computation="GEMM", collective="all_to_all")
@takes_sizes
def gemm_all_to_all_columns(
    sizes: ProductSizes,
    *,
    rank: int = 0,
    splits: Sequence[int] | None = None,
    column_counts: Sequence[int] | None = None,
) -> ProductCost:
    """Compute the cost of ``rank`` for its rows of x and all of ``w [columns, inner]``.

    Every column is computed once, also one that several ranks get.

    Args:
        sizes: ``rows`` are those of this rank's x.
        splits: Rows of each rank; as many as ``rank`` has by default.
        column_counts: Columns that each rank gets; evenly split by default.
    """
    ranks = sizes.world_size
    counts = _even(sizes.columns, ranks) if column_counts is None else column_counts
    rows = ranks * sizes.rows if splits is None else sum(splits)
    itemsize = sizes.output_itemsize
    return ProductCost(
        flops=sizes.flops,
        memory_bytes=sizes.operand_bytes + rows * counts[rank] * itemsize,
        link_bytes=sizes.rows * (sum(counts) - counts[rank]) * itemsize,
        receive_bytes=0,
        size=sizes.rows * sum(counts) * itemsize,
    )


@cost_of("all_to_all_gemm", computation="GEMM", collective="all_to_all", collective_first=True)
@takes_sizes
def all_to_all_gemm(
    sizes: ProductSizes,
    *,
    rank: int = 0,
    splits: Sequence[int] | None = None,
    column_splits: Sequence[int] | None = None,
) -> ProductCost:
    """Compute the cost of ``rank`` for its columns of x, and its rows of the product.

    This rank's rows of all columns are written, by it and its peers, before the product reads them;
    its columns of all rows are read once.

    Args:
        sizes: ``rows`` are those of this rank's result, ``inner`` the columns of all ranks' x.
        splits: Rows of the result on each rank; as many as ``rank`` has by default.
        column_splits: Columns of x on each rank; evenly split by default.
    """
    ranks = sizes.world_size
    counts = _even(sizes.inner, ranks) if column_splits is None else column_splits
    rows = ranks * sizes.rows if splits is None else sum(splits)
    gathered_bytes, own_bytes = (
        sizes.rows * sizes.inner * sizes.itemsize,
        counts[rank] * sizes.itemsize,
    )
    # A group of one rank multiplies x where it is.
    moved = gathered_bytes + rows * own_bytes if ranks > 1 else 0
    return ProductCost(
        flops=sizes.flops,
        memory_bytes=sizes.operand_bytes + sizes.output_bytes + moved,
        link_bytes=(rows - sizes.rows) * own_bytes,
        receive_bytes=0,
        size=gathered_bytes,
    )


def _even(count: int, ranks: int) -> list[int]:
    """Return the columns of each rank if they are shared out evenly."""
    return [(count + ranks - 1 - rank) // ranks for rank in range(ranks)]
