"""Costs of the operators around a matrix product, by hand: x [8, 4], w [6, 4], two bytes an
element, four ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from interlace.costs.gemm import (
    ProductCost,
    all_gather_gemm,
    gemm_all_reduce,
    gemm_all_to_all,
    gemm_reduce_scatter,
    leaving,
)

SIZES: dict[str, Any] = {"rows": 8, "columns": 6, "inner": 4, "itemsize": 2}
FLOPS = 2 * 8 * 6 * 4
MEMORY = 2 * (8 * 4 + 6 * 4 + 8 * 6)
OUTPUT = 8 * 6 * 2


def test_all_to_all() -> None:
    """Six of eight rows leave."""
    assert gemm_all_to_all(**SIZES, world_size=4) == ProductCost(
        FLOPS, MEMORY, 6 * 6 * 2, 0, OUTPUT
    )


def test_reduce_scatter() -> None:
    """Parts of six rows leave; then four slots of two rows are read, and their sum written."""
    cost = gemm_reduce_scatter(**SIZES, world_size=4)
    assert cost == ProductCost(FLOPS, MEMORY, 6 * 6 * 2, OUTPUT + OUTPUT // 4, OUTPUT)


def test_all_reduce() -> None:
    """As reduce-scatter, and the sums of two rows go to three ranks; six rows of sums are written
    here.
    """
    scatter, cost = (
        gemm_reduce_scatter(**SIZES, world_size=4),
        gemm_all_reduce(**SIZES, world_size=4),
    )
    assert cost.link_bytes == scatter.link_bytes + 3 * 2 * 6 * 2
    assert cost.receive_bytes == scatter.receive_bytes + 6 * 6 * 2


def test_all_gather() -> None:
    """Two rows of x go to three ranks; six come, are written, and read with the others: 8 bytes
    each, which travel as 16.
    """
    assert all_gather_gemm(**SIZES, world_size=4) == ProductCost(
        FLOPS, MEMORY + 6 * 16, 6 * 16, 0, 8 * 16
    )


def test_one_rank_sends_nothing() -> None:
    for operator in (gemm_all_to_all, gemm_reduce_scatter, gemm_all_reduce, all_gather_gemm):
        cost = operator(**SIZES, world_size=1)
        assert (cost.link_bytes, cost.receive_bytes) == (0, 0)


def test_rows_that_are_not_split_evenly() -> None:
    """Rank 1 has three of eight rows, or gives three of eight to itself; even splits given as lists
    change nothing.
    """
    sizes = SIZES | {"world_size": 4, "rank": 1}
    sent = gemm_all_to_all(**sizes, input_splits=[4, 3, 0, 1], output_splits=[0, 3, 2, 0])
    assert sent == ProductCost(FLOPS, MEMORY - 3 * 6 * 2, 5 * 6 * 2, 0, OUTPUT)
    owned = gemm_reduce_scatter(**sizes, splits=[4, 3, 0, 1])
    slots = 4 * 3 * 6 * 2
    assert owned == ProductCost(
        FLOPS, MEMORY - OUTPUT + slots, 5 * 6 * 2, slots + 3 * 6 * 2, OUTPUT
    )
    gathered = all_gather_gemm(**sizes, splits=[4, 3, 0, 1])
    assert gathered == ProductCost(FLOPS, MEMORY + 5 * 16, 3 * 3 * 16, 0, 8 * 16)
    even = [2, 2, 2, 2]
    assert gemm_all_to_all(**sizes, input_splits=even, output_splits=even) == gemm_all_to_all(
        **sizes
    )
    for operator in (gemm_reduce_scatter, all_gather_gemm):
        assert operator(**sizes, splits=even) == operator(**sizes)
    # In all, what leaves some rank arrives at another.
    splits = [4, 3, 0, 1]
    received = sum((8 - count) * 16 for count in splits)
    assert (
        sum(
            all_gather_gemm(**sizes | {"rank": rank}, splits=splits).link_bytes for rank in range(4)
        )
        == received
    )


def test_results_of_another_width_than_operands() -> None:
    """Operands of one byte, results of two: half the operands' bytes, and what travels as
    before.
    """
    narrow = SIZES | {"itemsize": 1, "output_itemsize": 2, "world_size": 4}
    operands = 8 * 4 + 6 * 4
    for operator in (gemm_all_to_all, gemm_reduce_scatter, gemm_all_reduce):
        cost, wide = operator(**narrow), operator(**SIZES, world_size=4)
        assert cost == dataclasses.replace(wide, memory_bytes=wide.memory_bytes - operands)
    # There, the operand travels.
    assert all_gather_gemm(**narrow) == ProductCost(
        FLOPS, operands + OUTPUT + 6 * 16, 6 * 16, 0, 8 * 16
    )


def test_uneven_shares_are_rounded_up() -> None:
    assert leaving(10, 4) == 9
