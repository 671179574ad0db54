"""The tiles of ``linears``."""

from __future__ import annotations

import dataclasses

from interlace.tuning.configuration import Configuration, between, power_of_two

MOST_TOKENS = 16
"""Tokens (rows of x) that the kernel takes: with more, a product is no longer bound by reading its
weight alone.
"""


@dataclasses.dataclass(frozen=True)
class LinearsConfig(Configuration):
    """One way to cut the products into tiles.

    Attributes:
        block_n: rows of a weight that a program covers; a power of two.
        block_k: columns of a weight that a program loads at a time; a power of two.
        num_warps: warps per program.
        num_stages: loads in flight in the software pipeline (with several tokens).
    """

    block_n: int = power_of_two(4, 1, 1024)
    block_k: int = power_of_two(512, 16, 1 << 16)
    num_warps: int = power_of_two(1, 1, 32)
    num_stages: int = between(1, 1, 32)


def default_config(tokens: int, itemsize: int) -> LinearsConfig:
    """Return the tiles of a number of tokens, whose elements have ``itemsize`` bytes."""
    if tokens <= 1:
        return LinearsConfig(block_k=1024 // itemsize)
    return LinearsConfig(block_n=32, block_k=256 // itemsize, num_warps=4, num_stages=3)
