"""What ``gemm_reduce_scatter`` computes: an example, then everything against float64, gradients,
and torch's own tools.
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

OPERATOR = "gemm_reduce_scatter"
pytestmark = pytest.mark.parametrize("impl", IMPLS[OPERATOR])


def _worked_example(impl):
    """Parts [1, 2, 3] on rank 0 and [10, 20, 30] on rank 1: rank 0 owns two rows unless splits say
    otherwise.
    """
    x = torch.tensor([[1.0], [2.0], [3.0]])
    w = torch.full((1, 1), 10.0 if dist.get_rank() else 1.0)
    bias = torch.tensor([100.0])
    y = interlace.gemm_reduce_scatter(x, w, impl=impl)
    return y.flatten().tolist(), interlace.gemm_reduce_scatter(
        x, w, bias, splits=[0, 3], impl=impl
    ).flatten().tolist()


def test_worked_example(ranks, impl):
    assert ranks(2).run(_worked_example, impl) == [
        ([11.0, 22.0], []),
        ([33.0], [111.0, 122.0, 133.0]),
    ]


SPLITS = {1: [11], 2: [9, 2], 4: [1, 0, 7, 3]}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_matches_float64(ranks, world_size, impl):
    """Every dtype; even, balanced and given splits, of which some are zero; odd and empty sizes; w
    along either dimension.
    """
    splits = SPLITS[world_size]
    calls = [
        Call(OPERATOR, rows, columns, inner, dtype, bias, given, impl=impl, w_along=along, seed=i)
        for i, (rows, columns, inner, dtype, bias, given, along) in enumerate(
            [
                (1, 1, 1, "float32", False, None, "K"),
                (11, 33, 50, "float32", True, splits, "K"),
                (64, 64, 32, "float16", True, None, "K"),
                (11, 7, 65, "bfloat16", True, splits, "N"),
                (13, 19, 24, "float8", True, None, "K"),
                (0, 5, 7, "float32", True, None, "K"),
                (3, 0, 7, "float32", False, None, "K"),
                (3, 5, 0, "float32", True, None, "K"),
            ]
        )
    ]
    calls.append(
        Call(OPERATOR, 4, 8, 16, "float8", True, scale="tensor", out_dtype="float32", impl=impl)
    )
    calls.append(Call(OPERATOR, 9, 8, 16, "bfloat16", True, out_dtype="float32", impl=impl))
    calls = [call for call in calls if call.can_run]
    check_all(calls, ranks(world_size).run(run, calls))


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients(ranks, world_size, impl):
    """The backward pass is ``all_gather_gemm``."""
    for call in (
        Call(OPERATOR, 7, 9, 6, bias=True, impl=impl),
        Call(OPERATOR, 11, 9, 6, bias=True, splits=SPLITS[world_size], w_along="N", impl=impl),
        Call(OPERATOR, 6, 9, 7, "bfloat16", bias=True, out_dtype="float32", impl=impl),
    ):
        if call.can_run:
            check_gradients(call, ranks(world_size).run(differentiate, call))


@st.composite
def _calls(draw, world_size, impl):
    splits = draw(st.none() | st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size))
    size, dtypes = (
        st.integers(1, 40),
        [dtype for dtype in DTYPES if impl != "chunked" or dtype != "float8"],
    )
    rows = draw(size) if splits is None else sum(splits)
    return Call(
        OPERATOR,
        rows,
        draw(size),
        draw(size),
        draw(st.sampled_from(dtypes)),
        draw(st.booleans()),
        splits,
        impl=impl,
    )


def test_any_call_is_right(ranks, impl):
    @settings(max_examples=6)
    @given(batch=st.lists(_calls(4, impl), min_size=1, max_size=4))
    def check(batch):
        check_all(batch, ranks(4).run(run, batch))

    check()


def test_opcheck_and_compile(ranks, impl):
    """Default splits too with a number of rows that the compiler does not know."""
    call = Call(OPERATOR, 5, 6, 7, bias=True, impl=impl)
    for splits in (None, [4, 1]):
        for outcome in ranks(2).run(opcheck, call, (splits, torch.float32, "", impl, "")):
            assert set(outcome.values()) == {"SUCCESS"}, outcome
    for eager, graph in ranks(2).run(
        compiled, Call(OPERATOR, 11, 9, 6, bias=True, splits=SPLITS[2], impl=impl)
    ):
        torch.testing.assert_close(graph, eager, rtol=0, atol=0)
