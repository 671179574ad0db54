"""Cost of the operators around a product ``x [M, K] @ w[N, K].T -> [M, N]`` on every rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from interlace.costs.cost import NetworkCost
from interlace.units import ceil_div

AnyCost = TypeVar("AnyCost")

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
