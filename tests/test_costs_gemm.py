"""Costs of the operators around a matrix product, by hand: x [8, 4], w [6, 4], two bytes an element, four ranks."""

from __future__ import annotations

from interlace.costs import all_gather_gemm, gemm_all_reduce, gemm_all_to_all, gemm_reduce_scatter
from interlace.costs.gemm import ProductCost, leaving

SIZES = {"rows": 8, "columns": 6, "inner": 4, "itemsize": 2}
FLOPS = 2 * 8 * 6 * 4
MEMORY = 2 * (8 * 4 + 6 * 4 + 8 * 6)
OUTPUT = 8 * 6 * 2


def test_all_to_all() -> None:
    """Six of eight rows leave."""
    assert gemm_all_to_all.fused(**SIZES, world_size=4) == ProductCost(FLOPS, MEMORY, 6 * 6 * 2, 0, OUTPUT)


def test_reduce_scatter() -> None:
    """Parts of six rows leave; then four slots of two rows are read, and their sum written."""
    cost = gemm_reduce_scatter.fused(**SIZES, world_size=4)
    assert cost == ProductCost(FLOPS, MEMORY, 6 * 6 * 2, OUTPUT + OUTPUT // 4, OUTPUT)
    wide = gemm_reduce_scatter.fused(**SIZES, world_size=4, part_itemsize=4)
    assert (wide.link_bytes, wide.size, wide.memory_bytes) == (6 * 6 * 4, 8 * 6 * 4, MEMORY + OUTPUT)


def test_all_reduce() -> None:
    """As reduce-scatter, and the sums of two rows go to three ranks; six rows of sums are written here."""
    scatter, cost = gemm_reduce_scatter.fused(**SIZES, world_size=4), gemm_all_reduce.fused(**SIZES, world_size=4)
    assert cost.link_bytes == scatter.link_bytes + 3 * 2 * 6 * 2
    assert cost.receive_bytes == scatter.receive_bytes + 6 * 6 * 2


def test_all_gather() -> None:
    """Two rows of x go to three ranks; six come, are written, and read with the others."""
    assert all_gather_gemm.fused(**SIZES, world_size=4) == ProductCost(FLOPS, MEMORY + 6 * 4 * 2, 6 * 4 * 2, 0, 8 * 4 * 2)


def test_one_rank_sends_nothing() -> None:
    for operator in (gemm_all_to_all, gemm_reduce_scatter, gemm_all_reduce, all_gather_gemm):
        cost = operator.fused(**SIZES, world_size=1)
        assert (cost.link_bytes, cost.receive_bytes) == (0, 0)


def test_uneven_shares_are_rounded_up() -> None:
    assert leaving(10, 4) == 9
