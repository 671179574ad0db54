"""``impl="mapped"``: plain ``torch.mm`` whose output is the peers' memory, as an implementation of the operators."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.mapped import kept_product
from tests.errors import error_of
from tests.products.calls import Call, check_all, check_gradients, differentiate, run

OPERATORS = ["gemm_all_to_all", "gemm_reduce_scatter", "gemm_all_reduce"]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_matches_float64(ranks, world_size, operator):
    """Every dtype, w along either dimension, sizes that need padding; the same memory for several calls."""
    sizes = [
        (16, 24, 20, "float32", "K"),
        (64, 1000, 12, "bfloat16", "N"),
        (8, 1024, 5, "float16", "K"),
        (64, 1000, 12, "bfloat16", "K"),
    ]
    calls = [Call(operator, *size[:4], w_along=size[4], impl="mapped", seed=i) for i, size in enumerate(sizes)]
    check_all(calls, ranks(world_size).run(run, calls))


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients(ranks, operator):
    call = Call(operator, 8, 12, 6, impl="mapped")
    check_gradients(call, ranks(2).run(differentiate, call))


def _memory_of_many_sizes():
    """Sizes come and go; what is kept is bounded, and ``release`` gives it back."""
    group, pair = interlace.group_of(), dist.group.WORLD
    w = torch.ones(512, 4)
    for rows in range(2, 28, 2):
        Call("gemm_reduce_scatter", rows, 512, 4, impl="mapped").make()
    kept = len(group.kept)
    # Nobody has asked for a mapped output of these sizes: the ones that are used stay.
    new, old = torch.ones(40, 4), torch.ones(26, 4)
    unasked = [kept_product("reduce_scatter", x, w, group, pair, replace=False) is None for x in (new, old)]
    interlace.synchronize()
    group.release()
    return kept, unasked, len(group.kept)


def test_memory_is_bounded(ranks):
    assert ranks(2).run(_memory_of_many_sizes) == [(8, [True, False], 0)] * 2


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (Call("gemm_reduce_scatter", 7, 8, 4), "rows that are split evenly"),
        (Call("gemm_all_to_all", 8, 8, 4, bias=True), "no bias"),
        (Call("gemm_all_reduce", 8, 8, 4, "float8"), "a result of the dtype of x"),
        (Call("gemm_all_reduce", 7, 8, 4, bias=True), "rows that are split evenly and no bias"),
    ],
)
def test_what_cannot_be_mapped_is_refused(ranks, call, missing):
    for kind, message in ranks(2).run(_refused, call):
        assert kind == "ArgumentError"
        assert message == f"{call.operator}: impl='mapped' must have {missing}. Take impl='auto', 'fused' or 'unfused'."


def _refused(call):
    dist.barrier()
    return error_of(lambda: call.make(impl="mapped"))[:2]
