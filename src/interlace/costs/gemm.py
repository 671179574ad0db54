"""Cost of the operators around a product ``x [M, K] @ w[N, K].T -> [M, N]`` on every rank."""

from __future__ import annotations

import dataclasses

from interlace.units import ceil_div


@dataclasses.dataclass(frozen=True)
class ProductCost:
    """Work and traffic of one rank in one call.

    Attributes:
        flops: multiplications and additions of the product.
        memory_bytes: bytes that this GPU's memory reads and writes for the product: every operand
            once, and the bytes that peers write into this memory.
        link_bytes: bytes that leave this rank.
        receive_bytes: memory traffic after the peers' parts have arrived: the slots are read, and
            their sum is written.
        size: bytes of each rank's buffer that the collective exchanges.
    """

    flops: int
    memory_bytes: int
    link_bytes: int
    receive_bytes: int
    size: int


def operand_bytes(m: int, n: int, k: int, itemsize: int) -> int:
    """Count the bytes of x and w, each read once."""
    return itemsize * (m * k + n * k)


def leaving(size: int, world_size: int) -> int:
    """Count the bytes of an equally split buffer that belong to the peers.

    Shares are rounded up to whole bytes.
    """
    return ceil_div(size, world_size) * (world_size - 1)
