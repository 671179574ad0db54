"""What the operators around one product compute: examples, then everything against float64,
gradients, and torch's own tools.
"""

from __future__ import annotations

from typing import Any

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

WAYS = [(operator, impl) for operator, impls in IMPLS.items() for impl in impls]
every_way = pytest.mark.parametrize(("operator", "impl"), WAYS)

_ROWS_OF_RANKS = {1: [11], 2: [9, 2], 4: [1, 0, 7, 3]}
SPLITS: dict[str, dict[int, Any]] = {
    "gemm_all_reduce": {1: None, 2: None, 4: None},
    "gemm_reduce_scatter": _ROWS_OF_RANKS,
    "all_gather_gemm": _ROWS_OF_RANKS,
    "gemm_all_to_all": {
        1: [[5]],
        2: [[3, 0], [7, 2]],
        4: [[1, 2, 0, 4], [0, 0, 0, 0], [3, 1, 1, 1], [0, 5, 0, 2]],
    },
}
"""Rows of the ranks, some of them none, by operator and number of ranks; see ``Call.splits``."""


def _rows(operator: str, rows: int, world_size: int) -> int:
    """Rows of x that the operator can share out: an all-to-all has as many for every rank."""
    return rows * world_size if operator == "gemm_all_to_all" else rows


# Worked examples


def _all_reduce(impl: str) -> Any:
    """Parts [1, 2, 3] on rank 0 and [10, 20, 30] on rank 1."""
    x = torch.tensor([[1.0], [2.0], [3.0]])
    w = torch.full((1, 1), 10.0 if dist.get_rank() else 1.0)
    return interlace.gemm_all_reduce(x, w, torch.tensor([100.0]), impl=impl).flatten().tolist()


def _reduce_scatter(impl: str) -> Any:
    """The same parts: rank 0 owns two rows unless splits say otherwise."""
    x = torch.tensor([[1.0], [2.0], [3.0]])
    w = torch.full((1, 1), 10.0 if dist.get_rank() else 1.0)
    bias = torch.tensor([100.0])
    y = interlace.gemm_reduce_scatter(x, w, impl=impl)
    z = interlace.gemm_reduce_scatter(x, w, bias, splits=[0, 3], impl=impl)
    return y.flatten().tolist(), z.flatten().tolist()


def _all_gather(impl: str) -> Any:
    """Rows [1, 2] on rank 0 and [3] on rank 1; rank 1's only column is ten times rank 0's."""
    rank = dist.get_rank()
    x = torch.tensor([[1.0], [2.0]] if rank == 0 else [[3.0]])
    w = torch.full((1, 1), 10.0 if rank else 1.0)
    y, gathered = interlace.all_gather_gemm(x, w, splits=[2, 1], return_gathered=True, impl=impl)
    return y.flatten().tolist(), gathered.flatten().tolist()


def _all_to_all(impl: str) -> Any:
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


_EXAMPLES = {
    "gemm_all_reduce": (_all_reduce, [[111.0, 122.0, 133.0]] * 2),
    "gemm_reduce_scatter": (
        _reduce_scatter,
        [([11.0, 22.0], []), ([33.0], [111.0, 122.0, 133.0])],
    ),
    "all_gather_gemm": (
        _all_gather,
        [([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), ([10.0, 20.0, 30.0], [1.0, 2.0, 3.0])],
    ),
    "gemm_all_to_all": (_all_to_all, [[1.0, 2.0, 4.0], [2.0, 3.0, 6.0]]),
}


@every_way
def test_worked_example(ranks: Any, operator: str, impl: str) -> None:
    example, expected = _EXAMPLES[operator]
    assert ranks(2).run(example, impl) == expected


# Against float64


@pytest.mark.parametrize("world_size", [1, 4])
@every_way
def test_matches_float64(ranks: Any, world_size: int, operator: str, impl: str) -> None:
    """Every dtype; rows shared out evenly and as given; odd, small and empty sizes; w along either
    dimension. An all-reduce has the same bits on every rank.
    """
    given_splits = SPLITS[operator][world_size]
    sizes = [
        (1, 1, 1, "float32", False, False, "K"),
        (3, 21, 40, "float32", True, False, "N"),
        (11, 33, 50, "float32", True, True, "K"),
        (16, 64, 32, "float16", True, False, "K"),
        (11, 7, 65, "bfloat16", True, True, "N"),
        (5, 19, 24, "float8", True, False, "K"),
        (11, 18, 33, "float8", False, True, "N"),
        (0, 5, 7, "float32", True, False, "K"),
        (3, 0, 7, "float32", False, False, "K"),
        (3, 5, 0, "float32", True, False, "K"),
    ]
    calls = [
        Call(
            operator, _rows(operator, rows, world_size), columns, inner, dtype, bias,
            given_splits if is_split else None, impl=impl, w_along=along, seed=i,
        )
        for i, (rows, columns, inner, dtype, bias, is_split, along) in enumerate(sizes)
    ]  # fmt: skip
    more = {"out_dtype": "float32", "impl": impl}
    calls.append(Call(operator, 4, 8, 16, "float8", True, scale="tensor", **more))
    calls += [
        Call(
            operator, _rows(operator, rows, world_size), columns, inner, "float8", bias,
            given_splits if is_split else None, impl=impl, scale="block", w_along=along, seed=seed,
        )
        for seed, rows, columns, inner, bias, is_split, along in [
            (0, 5, 19, 140, True, False, "K"),
            (1, 11, 144, 272, False, True, "N"),
            (2, 1, 130, 8, False, False, "K"),
            (3, 4, 3, 300, True, False, "K"),
        ]
    ]  # fmt: skip
    rows = 4 if operator == "gemm_all_to_all" else 9
    calls.append(Call(operator, rows, 8, 16, "bfloat16", True, **more))
    if operator == "gemm_all_to_all":
        nothing = [[0] * world_size] * world_size
        calls.append(Call(operator, 2, 5, 7, "float32", True, nothing, impl=impl))
    calls = [call for call in calls if call.can_run]
    results = ranks(world_size).run(run, calls)
    check_all(calls, results)
    if operator == "gemm_all_reduce":
        for of_rank in results:
            assert all(map(torch.equal, of_rank, results[0]))


@pytest.mark.parametrize("world_size", [1, 2])
@every_way
def test_gradients(ranks: Any, world_size: int, operator: str, impl: str) -> None:
    splits = SPLITS[operator][world_size]
    rows = 6 if operator == "gemm_all_to_all" else 7
    for call in (
        Call(operator, rows, 9, 6, bias=True, impl=impl),
        Call(operator, 11, 9, 6, bias=True, splits=splits, w_along="N", impl=impl),
        Call(operator, 6, 9, 7, "bfloat16", bias=True, out_dtype="float32", impl=impl),
        Call(operator, 6, 9, 0, bias=True, impl=impl),
    ):
        if call.can_run:
            check_gradients(call, ranks(world_size).run(differentiate, call))


def _with_vectors_apart(call: Call) -> bool:
    """Whether a bias and scales whose elements are apart give the same bits as others."""
    tensors = call.placed()
    apart = {
        name: torch.stack([vector, torch.full_like(vector, float("nan"))], -1)[..., 0]
        for name, vector in tensors.items()
        if name not in ("x", "w")
    }
    return torch.equal(call.make(**tensors | apart), call.make(**tensors))


@every_way
def test_vectors_need_not_be_contiguous(ranks: Any, operator: str, impl: str) -> None:
    for dtype in ("float32", "float8"):
        call = Call(operator, 6, 9, 16, dtype, bias=True, impl=impl)
        if call.can_run:
            assert ranks(2).run(_with_vectors_apart, call) == [True, True]


@st.composite
def _calls(draw: Any, operator: str, impl: str, world_size: int) -> Call:
    size = st.integers(1, 40)
    list_of_rows = st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size)
    rows, splits = draw(st.integers(1, 20)), None
    if operator == "gemm_all_to_all":
        splits = draw(st.lists(list_of_rows, min_size=world_size, max_size=world_size))
    elif operator != "gemm_all_reduce":
        splits = draw(st.none() | list_of_rows)
    if operator == "gemm_reduce_scatter" and splits is not None:
        rows = sum(splits)
    dtypes = [dtype for dtype in DTYPES if impl in ("fused", "unfused") or dtype != "float8"]
    return Call(
        operator, rows, draw(size), draw(size), draw(st.sampled_from(dtypes)), draw(st.booleans()),
        splits, impl=impl,
    )  # fmt: skip


@every_way
def test_any_call_is_right(ranks: Any, operator: str, impl: str) -> None:
    """One rank's lists of rows may stay as they are while another's change."""

    @settings(max_examples=4)
    @given(batch=st.lists(_calls(operator, impl, 3), min_size=2, max_size=3))
    def check(batch: list[Call]) -> None:
        check_all(batch, ranks(3).run(run, batch))

    check()


# Torch's own tools


_ARGUMENTS: dict[str, list[tuple[int, tuple[Any, ...]]]] = {
    "gemm_all_reduce": [(5, ())],
    "gemm_reduce_scatter": [(5, (None,)), (5, ([4, 1],))],
    "all_gather_gemm": [(4, (None,)), (4, ([4, 4],))],
    "gemm_all_to_all": [(4, (None, None)), (4, ([2, 2], [2, 2]))],
}
"""Rows of x, and the arguments of the operator's schema that say how rows are shared out."""


@every_way
def test_opcheck_and_compile(ranks: Any, operator: str, impl: str) -> None:
    """Also with a number of rows that the compiler does not know, which is the same for every
    implementation, as is what the schema and the fake tensors make of given splits.
    """
    is_of_operator = impl == "unfused"
    for rows, arguments in _ARGUMENTS[operator][: None if is_of_operator else 1]:
        call = Call(operator, rows, 6, 7, bias=True, impl=impl)
        gathers = (True,) if operator == "all_gather_gemm" else ()
        schema = (*arguments, torch.float32, *gathers, "", impl, "")
        for outcome in ranks(2).run(opcheck, call, schema, is_of_operator):
            assert set(outcome.values()) == {"SUCCESS"}, outcome
    call = Call(operator, 11, 9, 6, bias=True, splits=SPLITS[operator][2], impl=impl)
    for eager, graph in ranks(2).run(compiled, call):
        torch.testing.assert_close(graph, eager, rtol=0, atol=0)


# What single operators have beside that


def _gathered(call: Call) -> tuple[bool, bool]:
    """Every rank's x, bit by bit, with and without columns; a constant to autograd; and the same
    product as without it.
    """
    y, gathered = call.make(return_gathered=True)
    if call.dtype != "float8":
        x = call.inputs(dist.get_rank())["x"].requires_grad_()
        assert [t.requires_grad for t in call.make(x=x, return_gathered=True)] == [True, False]
    everyone = torch.cat([call.inputs(rank)["x"] for rank in range(dist.get_world_size())])
    same_rows = torch.equal(gathered.view(torch.uint8), everyone.view(torch.uint8))
    return same_rows, torch.equal(call.make(), y)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("impl", IMPLS["all_gather_gemm"])
def test_the_gathered_rows(ranks: Any, world_size: int, impl: str) -> None:
    splits = SPLITS["all_gather_gemm"][world_size]
    for columns, dtype in ((6, "bfloat16"), (6, "float8"), (0, "float32")):
        call = Call("all_gather_gemm", 4, columns, 10, dtype, splits=splits, impl=impl)
        if call.can_run:
            assert ranks(world_size).run(_gathered, call) == [(True, True)] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_of_an_all_reduce_in_chunks_need_not_divide(ranks: Any, world_size: int) -> None:
    """The last ranks have fewer rows to sum, or none: 5 rows of four ranks are 2, 2, 1 and 0."""
    calls = [
        Call("gemm_all_reduce", rows, 9, 16, dtype, True, impl="chunked", seed=rows)
        for rows in (1, 5, 11)
        for dtype in ("float32", "bfloat16")
    ]
    check_all(calls, ranks(world_size).run(run, calls))
    for call in calls[:3:2]:
        check_gradients(call, ranks(world_size).run(differentiate, call))


def _opcheck_gradient(splits: tuple[Any, Any]) -> Any:
    assert interlace.gemm_all_to_all is not None  # the first use of the name registers the op
    op = torch.ops.interlace.gemm_all_to_all_gradient.default
    return torch.library.opcheck(op, (torch.ones(4, 3), *splits, ""))


@pytest.mark.parametrize("splits", [(None, None), ([2, 2], [2, 2])])
def test_opcheck_of_an_all_to_all_s_gradient(ranks: Any, splits: tuple[Any, Any]) -> None:
    for outcome in ranks(2).run(_opcheck_gradient, splits):
        assert set(outcome.values()) == {"SUCCESS"}, outcome


@pytest.mark.parametrize("impl", IMPLS["gemm_all_to_all"])
def test_meta_tensors_have_the_shape_of_the_result(impl: str) -> None:
    x, w = (torch.empty(rows, 8, dtype=torch.bfloat16, device="meta") for rows in (6, 5))
    y = interlace.gemm_all_to_all(x, w, impl=impl)
    assert (y.shape, y.dtype, y.device.type) == (torch.Size([6, 5]), torch.bfloat16, "meta")
