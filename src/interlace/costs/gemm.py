"""Cost of the operators around a product ``x [M, K] @ w[N, K].T -> [M, N]`` on every rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from interlace.units import ceil_div

AnyCost = TypeVar("AnyCost")


@dataclasses.dataclass(frozen=True)
class ProductSizes:
    """Sizes of one rank's product ``x [rows, inner] @ w[columns, inner].T``, and of the group.

    Attributes:
        itemsize: bytes of an element of x and w.
        world_size: number of ranks.
        output_itemsize: bytes of an element of the result.
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
