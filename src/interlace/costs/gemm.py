"""What the operators around a matrix product compute and move: ``x [M, K] @ w[N, K].T -> [M, N]``
on every rank.
"""

from __future__ import annotations

import dataclasses

from interlace.units import ceil_div


@dataclasses.dataclass(frozen=True)
class ProductCost:
    """Work and traffic of one rank.

    Attributes:
        flops: multiplications and additions of the product.
        memory_bytes: that this GPU's memory reads and writes for the product, every operand once,
            what peers write here included.
        link_bytes: that leave this rank.
        receive_bytes: memory traffic after the peers' parts have come: reading the slots, writing
            their sum.
        size: bytes of the whole buffer that the collective exchanges, on each rank.
    """

    flops: int
    memory_bytes: int
    link_bytes: int
    receive_bytes: int
    size: int


def operand_bytes(m: int, n: int, k: int, itemsize: int) -> int:
    """x and w, each read once."""
    return itemsize * (m * k + n * k)


def leaving(size: int, world_size: int) -> int:
    """Bytes of an equally split buffer that belong to others, where the shares are rounded up to
    whole bytes.
    """
    return ceil_div(size, world_size) * (world_size - 1)
