"""Rows that one kernel stores in the peers' memory after a product. Run with ``-m gpu``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gemm.calls import Call, check_all, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("operator", ["gemm_all_to_all", "gemm_reduce_scatter"])
def test_matches_float64(ranks: Any, world_size: int, operator: str) -> None:
    """Vectors that fill and that do not; the same memory for several calls, graphs among them."""
    sizes = [
        (8, 1024, 512, "bfloat16", True),
        (72, 1030, 130, "float16", True),
        (8, 1, 64, "bfloat16", False),
        (1024, 4096, 256, "bfloat16", False),
        (64, 512, 512, "float32", True),
    ]
    calls = [
        Call(operator, *size, impl="pushed", seed=i) for i, size in enumerate(sizes) for _ in "abc"
    ]
    check_all(calls, ranks(world_size).run(run, calls))
