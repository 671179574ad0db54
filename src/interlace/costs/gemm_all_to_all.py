"""Cost of ``gemm_all_to_all``: every row of ``x @ w.T`` goes to the rank that owns it."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.costs.cost import NetworkCost
from interlace.costs.gemm import STAMP_BYTES, ProductCost, ProductSizes, leaving, takes_sizes
from interlace.costs.registry import cost_of, network_cost_of


def network_traffic(
    *, rank: int, sent: Sequence[Sequence[int]], row_bytes: int, slices: int,
    node_of_rank: Sequence[int],
) -> tuple[int, int]:  # fmt: skip
    """Count the bytes and the messages that ``rank`` sends to ranks of other nodes.

    Each peer gets a stamp, and its rows in as many messages as there are slices with rows.

    Args:
        rank: The rank that sends.
        sent: Rows from rank s to rank d, as ``sent[s][d]``.
        row_bytes: Bytes of a row of the product.
        slices: Number of slices of each pair of ranks.
        node_of_rank: Number of each rank's node.
    """
    far = [rows for peer, rows in enumerate(sent[rank]) if node_of_rank[peer] != node_of_rank[rank]]
    messages = sum(
        rows * (number + 1) // slices > rows * number // slices
        for rows in far
        for number in range(slices)
    )
    return sum(far) * row_bytes + len(far) * STAMP_BYTES, len(far) + messages


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
        input_splits: Rows that ``rank`` sends to each rank; evenly split by default.
        output_splits: Rows that ``rank`` gets from each rank; evenly split by default.
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


@network_cost_of("gemm_all_to_all", "chunked")
@takes_sizes
def chunked_between_nodes(
    sizes: ProductSizes, *, rank: int, node_of_rank: Sequence[int], slices: int
) -> NetworkCost:
    """Return the traffic between nodes of an even call whose rows leave in slices.

    The rows of all peers are multiplied before this rank's own, and arrive in the result itself.
    """
    ranks = sizes.world_size
    nbytes, messages = network_traffic(
        rank=rank,
        sent=[[sizes.rows // ranks] * ranks] * ranks,
        row_bytes=sizes.columns * sizes.output_itemsize,
        slices=slices,
        node_of_rank=node_of_rank,
    )
    return NetworkCost(nbytes, messages, slices, (ranks - 1) / ranks)
