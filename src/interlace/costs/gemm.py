"""Cost of the operators around a product ``x [M, K] @ w[N, K].T -> [M, N]`` on every rank.

Each operator has a function of its name, the cost of its fused kernel, and most have one of its
traffic between nodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from interlace.costs.registry import NetworkCost, cost_of, network_cost_of
from interlace.units import ceil_div, round_up

AnyCost = TypeVar("AnyCost")

_WORD_BYTES = 8
"""Bytes of the packed word by which a rank tells a peer which call it is in."""

STAMP_BYTES = 16
"""Bytes of the message by which a peer of another node knows the call."""

_LATENCY_BYTES = 640 << 10
"""Bytes that a network carries in the time in which a short message arrives: 110 us of NCCL's
sockets at 5.9 GB/s.
"""


@dataclasses.dataclass(frozen=True)
class ProductSizes:
    """Sizes of one rank's product ``x [rows, inner] @ w[columns, inner].T``, and of the group.

    Attributes:
        itemsize: Bytes of an element of x and w.
        world_size: Number of ranks.
        output_itemsize: Bytes of an element of the result.
    """

    rows: int
    columns: int
    inner: int
    itemsize: int
    world_size: int
    output_itemsize: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.rows * self.columns * self.inner

    @property
    def operand_bytes(self) -> int:
        """Bytes of x and w, each read once."""
        return self.itemsize * self.inner * (self.rows + self.columns)

    @property
    def output_bytes(self) -> int:
        """Bytes of the product, written once."""
        return self.rows * self.columns * self.output_itemsize


@dataclasses.dataclass(frozen=True)
class ProductCost:
    """Work and traffic of one rank in one call.

    Attributes:
        flops: Multiplications and additions of the product.
        memory_bytes: Bytes that this GPU's memory reads and writes for the product: every operand
            once, and the bytes that peers write into this memory.
        link_bytes: Bytes that leave this rank.
        receive_bytes: Memory traffic after the peers' parts have arrived: the slots are read, and
            their sum is written.
        size: Bytes of each rank's buffer that the collective exchanges.
    """

    flops: int
    memory_bytes: int
    link_bytes: int
    receive_bytes: int
    size: int


def takes_sizes(formula: Callable[..., AnyCost]) -> Callable[..., AnyCost]:
    """Let a formula, whose first argument is a :class:`ProductSizes`, take its fields by keyword.

    ``output_itemsize`` is ``itemsize`` by default. Other keywords go to the formula as they are.
    """

    @functools.wraps(formula)
    def by_keyword(
        *,
        rows: int,
        columns: int,
        inner: int,
        itemsize: int,
        world_size: int,
        output_itemsize: int | None = None,
        **others: Any,
    ) -> AnyCost:
        sizes = ProductSizes(
            rows, columns, inner, itemsize, world_size, output_itemsize or itemsize
        )
        return formula(sizes, **others)

    return by_keyword


def leaving(size: int, world_size: int) -> int:
    """Count the bytes of an equally split buffer that belong to the peers.

    Shares are rounded up to whole bytes.
    """
    return ceil_div(size, world_size) * (world_size - 1)


def rail_cost(
    *,
    rows: int,
    row_bytes: int,
    slices: int,
    node_of_rank: Sequence[int],
    remote_share: float,
    landing_bytes: int = 0,
    exchanges: int = 1,
) -> NetworkCost:
    """Return the traffic of a rank that has ``rows`` rows for each other rank of its rail.

    A rail is the ranks of one index within their nodes. Each of them gets a stamp, and the rows in
    slices.

    Args:
        rows: Rows of one exchange with one rank of the rail.
        row_bytes: Bytes of a row.
        slices: Number of slices of these rows; a slice without rows is not sent.
        node_of_rank: Number of each rank's node; every node has as many ranks.
        remote_share: Fraction of the computation after which the last slice is complete.
        landing_bytes: Bytes that memory moves for what has arrived.
        exchanges: How many such exchanges a call has, one after the other.
    """
    peers, sent = len(set(node_of_rank)) - 1, exchanges * rows * row_bytes
    return NetworkCost(
        peers * (sent + STAMP_BYTES),
        peers * (1 + exchanges * min(slices, rows)),
        exchanges * slices,
        remote_share,
        landing_bytes,
    )


def exchanges_sums(*, rows: int, row_bytes: int, nodes: int, node_ranks: int) -> bool:
    """Return whether the ranks of a rail exchange the sums of their nodes, each with each, where
    every rank needs all sums.

    Else each rank sums a share of the rows, which takes two exchanges one after the other, of fewer
    bytes if there are more than two nodes.

    Args:
        rows: Rows of the product.
        row_bytes: Bytes of a row.
        nodes: Number of nodes.
        node_ranks: Number of ranks of each node.
    """
    node_sum = rows // node_ranks * row_bytes
    in_shares = 2 * (nodes - 1) * (node_sum // nodes)
    return (nodes - 1) * node_sum <= in_shares + _LATENCY_BYTES


@cost_of("gemm_reduce_scatter", computation="GEMM", collective="reduce_scatter")
@takes_sizes
def gemm_reduce_scatter(
    sizes: ProductSizes, *, rank: int = 0, splits: Sequence[int] | None = None
) -> ProductCost:
    """Compute the cost of ``rank`` for ``x [rows, inner]`` and ``w [columns, inner]``.

    Every rank stores each of its parts in the slot that the part's owner keeps for this rank; the
    owner adds the slots.

    Args:
        sizes: ``inner`` is this rank's share of K.
        splits: Rows that each rank owns; evenly split by default.
    """
    ranks, size = sizes.world_size, sizes.output_bytes
    if splits is None:
        slots, sums, sent = size, size // ranks, leaving(size, ranks)
    else:
        row_bytes = sizes.columns * sizes.output_itemsize
        sums = splits[rank] * row_bytes
        slots = ranks * sums
        sent = (sizes.rows - splits[rank]) * row_bytes
    # Parts are written to the slots instead of to the output. A group of one rank needs no slots to
    # be added.
    received = slots + sums if ranks > 1 else 0
    return ProductCost(sizes.flops, sizes.operand_bytes + slots, sent, received, size)


@network_cost_of("gemm_reduce_scatter", "chunked")
@takes_sizes
def gemm_reduce_scatter_between_nodes(
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


@cost_of("gemm_all_reduce", computation="GEMM", collective="all_reduce")
@takes_sizes
def gemm_all_reduce(sizes: ProductSizes) -> ProductCost:
    """Compute the cost of one rank, in two phases.

    The first phase is a ``gemm_reduce_scatter``; in the second every owner sends its sums to all
    peers.

    Args:
        sizes: ``inner`` is this rank's share of K.
    """
    first = gemm_reduce_scatter(**vars(sizes))
    # The peers write their sums into this rank's output, on top of the reduce-scatter's traffic.
    peer_sums = sizes.output_bytes - sizes.output_bytes // sizes.world_size
    return dataclasses.replace(
        first,
        link_bytes=first.link_bytes + leaving(sizes.output_bytes, sizes.world_size),
        receive_bytes=first.receive_bytes + peer_sums if sizes.world_size > 1 else 0,
    )


@network_cost_of("gemm_all_reduce", "chunked")
@takes_sizes
def gemm_all_reduce_between_nodes(
    sizes: ProductSizes, *, node_of_rank: Sequence[int], slices: int, **_: object
) -> NetworkCost:
    """Return the traffic between nodes of an even call in two levels; see
    :func:`exchanges_sums`.

    Args:
        slices: Number of slices of the rows of one exchange.
    """
    nodes = len(set(node_of_rank))
    node_ranks = sizes.world_size // nodes
    row_bytes = sizes.columns * sizes.output_itemsize
    is_direct = exchanges_sums(
        rows=sizes.rows, row_bytes=row_bytes, nodes=nodes, node_ranks=node_ranks
    )
    rows = sizes.rows // (node_ranks if is_direct else sizes.world_size)
    return rail_cost(
        rows=rows,
        row_bytes=row_bytes,
        slices=slices,
        node_of_rank=node_of_rank,
        remote_share=1.0 if is_direct else (nodes - 1) / nodes,
        landing_bytes=(nodes + 1) * rows * row_bytes,
        exchanges=1 if is_direct else 2,
    )


@cost_of("gemm_all_reduce_norm", computation="GEMM", collective="all_reduce")
@takes_sizes
def gemm_all_reduce_norm(sizes: ProductSizes, *, part_itemsize: int | None = None) -> ProductCost:
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
        link_bytes=peers * (part_bytes + _WORD_BYTES),
        # All parts are read; the residual is read and written, and the norm written.
        receive_bytes=peers * part_bytes + 3 * sizes.output_bytes,
        size=sizes.output_bytes,
    )


@cost_of("all_gather_gemm", computation="GEMM", collective="all_gather", collective_first=True)
@takes_sizes
def all_gather_gemm(
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
def all_gather_gemm_between_nodes(
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
def gemm_all_to_all(
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
def gemm_all_to_all_between_nodes(
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
