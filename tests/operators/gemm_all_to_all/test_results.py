"""What ``gemm_all_to_all`` computes: an example, then everything against float64, gradients, and
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

OPERATOR = "gemm_all_to_all"
pytestmark = pytest.mark.parametrize("impl", IMPLS[OPERATOR])


def _worked_example(impl):
    """Rank r multiplies rows [1, 2, 3] by r + 1; of three rows, rank 0 keeps one, rank 1 gives
    two.
    """
    rank = dist.get_rank()
    x, w = torch.tensor([[1.0], [2.0], [3.0]]), torch.full((1, 1), rank + 1.0)
    sent = [[1, 2], [2, 1]]
    y = interlace.gemm_all_to_all(
        x, w, input_splits=sent[rank], output_splits=[row[rank] for row in sent], impl=impl
    )
    return y.flatten().tolist()


def test_worked_example(ranks, impl):
    assert ranks(2).run(_worked_example, impl) == [[1.0, 2.0, 4.0], [2.0, 3.0, 6.0]]


SENT = {1: [[5]], 2: [[3, 0], [7, 2]], 4: [[1, 2, 0, 4], [0, 0, 0, 0], [3, 1, 1, 1], [0, 5, 0, 2]]}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_matches_float64(ranks, world_size, impl):
    """Every dtype; even and uneven splits, of which some are zero; odd, small and empty sizes; w
    along either dimension.
    """
    calls = [
        Call(
            OPERATOR,
            rows * world_size,
            columns,
            inner,
            dtype,
            bias,
            splits,
            impl=impl,
            w_along=along,
            seed=i,
        )
        for i, (rows, columns, inner, dtype, bias, splits, along) in enumerate(
            [
                (1, 1, 1, "float32", False, None, "K"),
                (3, 21, 40, "float32", True, None, "N"),
                (20, 33, 50, "float32", True, SENT[world_size], "K"),
                (16, 64, 32, "float16", True, None, "K"),
                (3, 7, 65, "bfloat16", True, SENT[world_size], "N"),
                (5, 19, 24, "float8", True, None, "K"),
                (5, 18, 33, "float8", False, SENT[world_size], "N"),
                (0, 5, 7, "float32", True, None, "K"),
                (2, 0, 7, "float32", False, None, "K"),
                (2, 5, 0, "float32", True, None, "K"),
                (2, 5, 7, "float32", True, [[0] * world_size] * world_size, "K"),
            ]
        )
    ]
    calls.append(
        Call(OPERATOR, 4, 8, 16, "float8", True, scale="tensor", out_dtype="float32", impl=impl)
    )
    calls.append(Call(OPERATOR, 4, 8, 16, "bfloat16", True, out_dtype="float32", impl=impl))
    check_all(calls, ranks(world_size).run(run, calls))


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients(ranks, world_size, impl):
    for call in (
        Call(OPERATOR, 6, 9, 7, bias=True, impl=impl),
        Call(OPERATOR, 6, 9, 7, bias=True, splits=SENT[world_size], w_along="N", impl=impl),
        Call(OPERATOR, 6, 9, 7, "bfloat16", bias=True, out_dtype="float32", impl=impl),
    ):
        check_gradients(call, ranks(world_size).run(differentiate, call))


@st.composite
def _calls(draw, world_size, impl):
    sent = draw(
        st.lists(
            st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size),
            min_size=world_size,
            max_size=world_size,
        )
    )
    size = st.integers(1, 40)
    return Call(
        OPERATOR,
        0,
        draw(size),
        draw(size),
        draw(st.sampled_from(list(DTYPES))),
        draw(st.booleans()),
        sent,
        impl=impl,
    )


def test_any_call_is_right(ranks, impl):
    """One rank's lists may stay as they are while another's change."""

    @settings(max_examples=6)
    @given(batch=st.lists(_calls(4, impl), min_size=1, max_size=4))
    def check(batch):
        check_all(batch, ranks(4).run(run, batch))

    check()


def _opcheck_gradient(splits):
    assert interlace.gemm_all_to_all is not None  # the first use of the name registers the op
    op = torch.ops.interlace.gemm_all_to_all_gradient.default
    return torch.library.opcheck(op, (torch.ones(4, 3), *splits, ""))


def test_opcheck_and_compile(ranks, impl):
    for splits in ((None, None), ([2, 2], [2, 2])):
        for outcome in ranks(2).run(_opcheck_gradient, splits):
            assert set(outcome.values()) == {"SUCCESS"}, outcome
    call = Call(OPERATOR, 4, 5, 7, bias=True, impl=impl)
    for arguments in ((None, None), ([2, 2], [2, 2])):
        for outcome in ranks(2).run(opcheck, call, (*arguments, torch.float32, "", impl, "")):
            assert set(outcome.values()) == {"SUCCESS"}, outcome
    for eager, graph in ranks(2).run(
        compiled, Call(OPERATOR, 6, 9, 7, bias=True, splits=SENT[2], impl=impl)
    ):
        torch.testing.assert_close(graph, eager, rtol=0, atol=0)


def test_meta_tensors_have_the_shape_of_the_result(impl):
    x, w = (
        torch.empty(6, 8, dtype=torch.bfloat16, device="meta"),
        torch.empty(5, 8, dtype=torch.bfloat16, device="meta"),
    )
    y = interlace.gemm_all_to_all(x, w, impl=impl)
    assert (y.shape, y.dtype, y.device.type) == (torch.Size([6, 5]), torch.bfloat16, "meta")
