"""What ``all_gather_gemm`` computes: an example, then everything against float64, gradients, and
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

OPERATOR = "all_gather_gemm"
pytestmark = pytest.mark.parametrize("impl", IMPLS[OPERATOR])


def _worked_example(impl):
    """Rows [1, 2] on rank 0 and [3] on rank 1; rank 1's only column is ten times rank 0's."""
    rank = dist.get_rank()
    x, w = (
        torch.tensor([[1.0], [2.0]] if rank == 0 else [[3.0]]),
        torch.full((1, 1), 10.0 if rank else 1.0),
    )
    y, gathered = interlace.all_gather_gemm(x, w, splits=[2, 1], return_gathered=True, impl=impl)
    return y.flatten().tolist(), gathered.flatten().tolist()


def test_worked_example(ranks, impl):
    assert ranks(2).run(_worked_example, impl) == [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([10.0, 20.0, 30.0], [1.0, 2.0, 3.0]),
    ]


SPLITS = {1: [11], 2: [9, 2], 4: [1, 0, 7, 3]}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_matches_float64(ranks, world_size, impl):
    """Every dtype; equal and given splits, of which some are zero; odd, small and empty sizes; w
    along either dimension.
    """
    splits = SPLITS[world_size]
    calls = [
        Call(OPERATOR, rows, columns, inner, dtype, bias, given, impl=impl, w_along=along, seed=i)
        for i, (rows, columns, inner, dtype, bias, given, along) in enumerate(
            [
                (1, 1, 1, "float32", False, None, "K"),
                (5, 33, 50, "float32", True, splits, "K"),
                (16, 64, 32, "float16", True, None, "K"),
                (5, 7, 65, "bfloat16", True, splits, "N"),
                (3, 19, 24, "float8", True, splits, "K"),
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


def _gathered(call):
    """Every rank's x, bit by bit, with and without columns; a constant to autograd; and the same
    product as without it.
    """
    y, gathered = call.make(return_gathered=True)
    if call.dtype != "float8":
        x = call.inputs(dist.get_rank())["x"].requires_grad_()
        assert [t.requires_grad for t in call.make(x=x, return_gathered=True)] == [True, False]
    everyone = torch.cat([call.inputs(rank)["x"] for rank in range(dist.get_world_size())])
    return torch.equal(gathered.view(torch.uint8), everyone.view(torch.uint8)), torch.equal(
        call.make(), y
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gathered_rows(ranks, world_size, impl):
    for columns, dtype in ((6, "bfloat16"), (6, "float8"), (0, "float32")):
        call = Call(OPERATOR, 4, columns, 10, dtype, splits=SPLITS[world_size], impl=impl)
        if call.can_run:
            assert ranks(world_size).run(_gathered, call) == [(True, True)] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients(ranks, world_size, impl):
    """The backward pass is ``gemm_reduce_scatter``."""
    for call in (
        Call(OPERATOR, 7, 9, 6, bias=True, impl=impl),
        Call(OPERATOR, 0, 9, 6, bias=True, splits=SPLITS[world_size], w_along="N", impl=impl),
        Call(OPERATOR, 6, 9, 7, "bfloat16", bias=True, out_dtype="float32", impl=impl),
    ):
        if call.can_run:
            check_gradients(call, ranks(world_size).run(differentiate, call))


@st.composite
def _calls(draw, world_size, impl):
    splits = draw(st.none() | st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size))
    size, dtypes = (
        st.integers(1, 40),
        [dtype for dtype in DTYPES if impl in ("fused", "unfused") or dtype != "float8"],
    )
    return Call(
        OPERATOR,
        draw(size),
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
    call = Call(OPERATOR, 4, 6, 7, bias=True, impl=impl)
    for splits in (None, [4, 4]):
        for outcome in ranks(2).run(opcheck, call, (splits, torch.float32, True, "", impl, "")):
            assert set(outcome.values()) == {"SUCCESS"}, outcome
    for eager, graph in ranks(2).run(
        compiled, Call(OPERATOR, 0, 9, 6, bias=True, splits=SPLITS[2], impl=impl)
    ):
        torch.testing.assert_close(graph, eager, rtol=0, atol=0)
