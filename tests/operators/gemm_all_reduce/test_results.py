"""What ``gemm_all_reduce`` computes: an example, then everything against float64, gradients, and
torch's own tools.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import interlace
from tests.gemm.calls import (
    DTYPES,
    IMPLS,
    Call,
    check_all,
    check_gradients,
    compiled,
    differentiate,
    opcheck,
    run,
)

OPERATOR = "gemm_all_reduce"
all_implementations = pytest.mark.parametrize("impl", IMPLS[OPERATOR])


def _worked_example(impl):
    """Parts [1, 2, 3] on rank 0 and [10, 20, 30] on rank 1."""
    x = torch.tensor([[1.0], [2.0], [3.0]])
    w = torch.full((1, 1), 10.0 if dist.get_rank() else 1.0)
    return interlace.gemm_all_reduce(x, w, torch.tensor([100.0]), impl=impl).flatten().tolist()


@all_implementations
def test_worked_example(ranks, impl):
    assert ranks(2).run(_worked_example, impl) == [[111.0, 122.0, 133.0]] * 2


@pytest.mark.parametrize("world_size", [1, 2, 4])
@all_implementations
def test_matches_float64(ranks, world_size, impl):
    """Every dtype; odd, small and empty sizes; w along either dimension; the same bits on every
    rank.
    """
    calls = [
        Call(OPERATOR, rows, columns, inner, dtype, bias, impl=impl, w_along=along, seed=i)
        for i, (rows, columns, inner, dtype, bias, along) in enumerate(
            [
                (1, 1, 1, "float32", False, "K"),
                (11, 33, 50, "float32", True, "N"),
                (64, 64, 32, "float16", True, "K"),
                (11, 7, 65, "bfloat16", True, "N"),
                (13, 19, 24, "float8", True, "K"),
                (0, 5, 7, "float32", True, "K"),
                (3, 0, 7, "float32", False, "K"),
                (3, 5, 0, "float32", True, "K"),
            ]
        )
    ]
    calls.append(
        Call(OPERATOR, 4, 8, 16, "float8", True, scale="tensor", out_dtype="float32", impl=impl)
    )
    calls.append(Call(OPERATOR, 9, 8, 16, "bfloat16", True, out_dtype="float32", impl=impl))
    results = ranks(world_size).run(run, calls)
    check_all(calls, results)
    assert all(
        torch.equal(y, first)
        for other in results
        for y, first in zip(other, results[0], strict=True)
    )


@pytest.mark.parametrize("world_size", [1, 2])
@all_implementations
def test_gradients(ranks, world_size, impl):
    for call in (
        Call(OPERATOR, 7, 9, 6, bias=True, w_along="N", impl=impl),
        Call(OPERATOR, 6, 9, 7, "bfloat16", bias=True, out_dtype="float32", impl=impl),
    ):
        check_gradients(call, ranks(world_size).run(differentiate, call))


SIZE = st.integers(1, 40)
CALLS = st.builds(
    Call, st.just(OPERATOR), SIZE, SIZE, SIZE, st.sampled_from(list(DTYPES)), st.booleans()
)


@all_implementations
def test_any_call_is_right(ranks, impl):
    @settings(max_examples=6)
    @given(batch=st.lists(CALLS, min_size=1, max_size=4))
    def check(batch):
        check_all(batch, ranks(4).run(run, batch))

    check()


@all_implementations
def test_opcheck_and_compile(ranks, impl):
    call = Call(OPERATOR, 5, 6, 7, bias=True, impl=impl)
    for outcome in ranks(2).run(opcheck, call, (torch.float32, "", impl, "")):
        assert set(outcome.values()) == {"SUCCESS"}, outcome
    for eager, graph in ranks(2).run(compiled, call):
        torch.testing.assert_close(graph, eager, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rows_in_chunks_need_not_divide(ranks, world_size):
    """The last ranks have fewer rows to sum, or none: 5 rows of four ranks are 2, 2, 1 and 0."""
    calls = [
        Call(OPERATOR, rows, 9, 16, dtype, True, impl="chunked", seed=rows)
        for rows in (1, 5, 11)
        for dtype in ("float32", "bfloat16")
    ]
    results = ranks(world_size).run(run, calls)
    check_all(calls, results)
    for call in calls[:3:2]:
        check_gradients(call, ranks(world_size).run(differentiate, call))
