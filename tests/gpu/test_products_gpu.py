"""The operators around a matrix product on GPUs. Run with ``-m gpu``.

Results and gradients are held against float64, with the bounds of the tests on the CPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.testing.cases.products import takes_bias
from tests.gemm.calls import (
    ANY_ROWS,
    IMPLS,
    Call,
    check_all,
    check_gradients,
    compiled,
    differentiate,
    run,
)
from tests.gpu.absent import call_without

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("operator", list(IMPLS))]

AT_ONCE = {
    operator: [
        "fused",
        "remote_stores" if operator == "gemm_all_reduce" else "pushed",
        *(["chunked"] if (operator, "chunked") in ANY_ROWS else []),
    ]
    for operator in IMPLS
}
"""Implementations with protocols of their own; tests of triggered transfers have the others."""

# Columns, inner, dtype, bias, given splits, what w is contiguous along. Even, odd, and larger than
# a tile.
KINDS = [
    (512, 256, "bfloat16", True, False, "K"),
    (513, 257, "bfloat16", True, True, "N"),
    (130, 520, "float16", False, True, "K"),
    (320, 64, "float32", True, False, "K"),
    (256, 384, "float8", True, True, "K"),
    (256, 384, "float8", False, False, "N"),
    (384, 768, "float8 in blocks", True, True, "K"),  # cuBLAS needs padding of w's scales
    (272, 1024, "float8 in blocks", False, False, "K"),
    (130, 520, "float8 in blocks", False, False, "K"),  # cuBLAS takes no such columns
]


def _splits(operator: str, world_size: int) -> object:
    """Uneven, and a rank without rows."""
    rows = [300, 0, 129, 71, 5, 0, 64, 17][:world_size]
    return (
        [rows[s:] + rows[:s] for s in range(world_size)] if operator == "gemm_all_to_all" else rows
    )


def _calls(operator: str, world_size: int) -> list[Call]:
    calls = []
    for impl in IMPLS[operator]:
        for i, (columns, inner, dtype, bias, given, along) in enumerate(KINDS):
            given = given and operator != "gemm_all_reduce"
            splits = _splits(operator, world_size) if given else None
            rows = sum(splits) if given and operator == "gemm_reduce_scatter" else 128 * world_size
            dtype, _, in_blocks = dtype.partition(" ")
            calls.append(
                Call(
                    operator,
                    rows,
                    columns,
                    inner,
                    dtype,
                    bias,
                    splits,
                    w_along=along,
                    scale="block" if in_blocks else "row",
                    impl=impl,
                    seed=i,
                )
            )
    return [call for call in calls if call.can_run]


def test_matches_float64(ranks: Any, world_size: int, operator: str) -> None:
    calls = _calls(operator, world_size)
    check_all(calls, ranks(world_size).run(run, calls))


def _differentiate_all(calls: list[Call]) -> list[dict[str, torch.Tensor]]:
    return [differentiate(call) for call in calls]


def test_gradients(ranks: Any, world_size: int, operator: str) -> None:
    calls = [call for call in _calls(operator, world_size) if call.dtype != "float8"]
    outcomes = ranks(world_size).run(_differentiate_all, calls)
    for i, call in enumerate(calls):
        # Longer sums than on the CPU: errors of many roundings grow with the root of their number.
        check_gradients(
            call, [rank[i] for rank in outcomes], factor=math.sqrt(call.inner + 128 * world_size)
        )


def _compile(calls: list[Call]) -> list[list[list[torch.Tensor]]]:
    return [[[tensor.cpu() for tensor in outcome] for outcome in compiled(call)] for call in calls]


def test_compiles_into_one_graph(ranks: Any, world_size: int, operator: str) -> None:
    calls = [
        dataclasses.replace(_calls(operator, world_size)[0], impl=impl) for impl in IMPLS[operator]
    ]
    for outcomes in ranks(world_size).run(_compile, calls):
        for eager, graph in outcomes:
            torch.testing.assert_close(graph, eager)


def _long_run(calls: list[Call], turns: int) -> int:
    """Calls in turn, ranks held up at random; elements that differ from the first result."""
    ready = [(call, call.placed()) for call in calls]
    expected = [call.make(**tensors) for call, tensors in ready]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for turn in range(turns):
        if torch.rand((), generator=generator) < 0.2:
            torch.cuda._sleep(int(torch.randint(0, 1_000_000, (), generator=generator)))
        for (call, tensors), wanted in zip(ready, expected, strict=True):
            y = call.make(**tensors)
            wrong += (y != wanted).sum()
            if turn % 2:
                del y
    interlace.synchronize()
    return int(wrong)


def test_many_calls_with_late_ranks(ranks: Any, world_size: int, turns: Any, operator: str) -> None:
    """Shapes, grids and implementations in turn: a stale slot, signal, epoch or ticket shows
    here.
    """
    rows = 128 * world_size
    for impl in AT_ONCE[operator]:
        calls = [
            Call(
                operator, rows, 512, 256, "bfloat16", takes_bias(operator, impl), impl=impl, seed=1
            ),
            Call(operator, 2 * world_size, 130, 520, "float16", impl="fused", seed=2),
            Call(operator, 8 * rows, 256, 512, "bfloat16", impl=impl, seed=3),
        ]
        assert ranks(world_size).run(_long_run, calls, turns(400)) == [0] * world_size


def _replay(call: Call) -> list[bool]:
    """A captured call, replayed on its x and on others, back to back and between ordinary calls."""
    tensors = call.placed()
    xs = [tensors["x"].clone(), -2 * tensors["x"], tensors["x"] + 1]
    expected = [call.make(**{**tensors, "x": x}) for x in xs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call.make(**tensors)
    same = []
    for turn in range(12):
        if (turn + dist.get_rank()) % 3 == 0:
            torch.cuda._sleep(300_000)
        tensors["x"].copy_(xs[turn % 3])
        graph.replay()
        found = [y.clone()]
        if turn % 4 >= 2:
            found.append(call.make(**tensors))
        same += [torch.equal(each, expected[turn % 3]) for each in found]
    interlace.synchronize()
    return same


def test_graphs(ranks: Any, world_size: int, operator: str) -> None:
    for impl in AT_ONCE[operator]:
        call = Call(
            operator, 128 * world_size, 512, 256, "bfloat16", takes_bias(operator, impl), impl=impl
        )
        assert all(all(same) for same in ranks(world_size).run(_replay, call))


def _absent_peer(call: Call) -> tuple[str, int, float, bool] | None:
    tensors = call.placed()
    return call_without(1, lambda group: call.make(group, **tensors))


def test_a_peer_that_never_calls(ranks: Any, operator: str) -> None:
    """What needs the peer is NaN, the error names it, and the GPU is free again."""
    for impl in AT_ONCE[operator]:
        call = Call(operator, 256, 512, 256, "bfloat16", impl=impl)
        kind, peer, spoilt, soon = ranks(2).run(_absent_peer, call)[0]
        assert (kind, peer, soon) == ("PeerTimeoutError", 1, True)
        assert spoilt > 0
