"""Results in memory of the caller's, and what follows them where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from tests.errors import error_of
from tests.gemm.calls import IMPLS, Call, check_all

ROWS, COLUMNS, INNER = 24, 16, 12


def _results(calls: list[Call]) -> tuple[list[torch.Tensor], list[bool]]:
    """Results of calls into symmetric tensors, and whether those are what is returned."""
    results, is_out = [], []
    for call in calls:
        splits = call.splits or [ROWS // dist.get_world_size()] * dist.get_world_size()
        memory = interlace.empty_symmetric((ROWS, COLUMNS), dtype=call.result_dtype).local
        out = memory[: splits[dist.get_rank()]]
        y = call.make(out=out)
        results.append(out.clone())
        is_out.append(y is out)
    return results, is_out


@pytest.mark.parametrize("impl", ["auto", "pushed", *IMPLS["gemm_reduce_scatter"]])
def test_results(ranks: Any, impl: str) -> None:
    """Rows of the result that need no padding, and such that do, which are copied."""
    call = Call("gemm_reduce_scatter", ROWS, COLUMNS, INNER, impl=impl, bias=True)
    calls = [call, Call("gemm_reduce_scatter", ROWS, COLUMNS, INNER, "bfloat16", impl=impl)]
    if impl != "pushed":
        calls.append(
            Call("gemm_reduce_scatter", ROWS, COLUMNS, INNER, impl=impl, splits=[17, 0, 7])
        )
    outcomes = ranks(3).run(_results, calls)
    check_all(calls, [results for results, _ in outcomes])
    assert all(all(is_out) for _, is_out in outcomes)


def _chained() -> float:
    """The largest error of layers whose result lies where the next product's peers read it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, w_1, w_2 = (
        [
            torch.randn(*shape, generator=torch.Generator().manual_seed(10 * seed + r))
            for r in range(ranks)
        ]
        for seed, shape in enumerate([(ROWS, INNER), (COLUMNS, INNER), (INNER, COLUMNS)])
    )
    rows = interlace.empty_symmetric((ROWS // ranks, COLUMNS), dtype=torch.float32)
    expected, actual = [each.clone() for each in x], x[rank]
    with torch.no_grad():
        for _ in range(3):
            total = sum(each @ w.T for each, w in zip(expected, w_1, strict=True))
            expected = [F.relu(total) @ w.T / INNER for w in w_2]
            hidden = interlace.gemm_reduce_scatter(actual, w_1[rank], out=rows.local)
            actual = interlace.all_gather_gemm(hidden.relu_(), w_2[rank]) / INNER
    return float((actual - expected[rank]).abs().max())


def test_a_block_without_staging(ranks: Any) -> None:
    assert max(ranks(2).run(_chained)) < 1e-4


def _refusals() -> list[str]:
    x, w = torch.ones(8, 4), torch.ones(4, 4)
    good = torch.ones(8 // dist.get_world_size(), 4)
    outs = [good[:1], good.T.contiguous().T, good.double()]
    errors = []
    for out in outs:
        errors.append(error_of(interlace.gemm_reduce_scatter, x, w, out=out)[1])
    weight = w.clone().requires_grad_()
    errors.append(error_of(interlace.gemm_reduce_scatter, x, weight, out=good)[1])
    return errors


def test_refusals(ranks: Any) -> None:
    shape, strides, dtype, gradient = ranks(2).run(_refusals)[0]
    assert (
        "out must be contiguous and [4, 4], as the result on this rank; got shape [1, 4]" in shape
    )
    assert "got shape [4, 4] and strides [1, 4]" in strides
    assert "gemm_reduce_scatter: out must be torch.float32 on cpu, like the result" in dtype
    assert "out must be left out where a gradient is recorded" in gradient
