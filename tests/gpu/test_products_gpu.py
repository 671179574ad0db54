"""The operators around a matrix product on real GPUs, one process a GPU. Run with ``-m gpu``.

Results and gradients are held against float64, with the bounds of the tests on the CPU.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import interlace
from tests.products.calls import IMPLS, Call, check_all, check_gradients, compiled, differentiate, run

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("operator", list(IMPLS))]

# Columns, inner, dtype, bias, given splits, what w is contiguous along. Even, odd, and larger than a tile.
KINDS = [
    (512, 256, "bfloat16", True, False, "K"),
    (513, 257, "bfloat16", True, True, "N"),
    (130, 520, "float16", False, True, "K"),
    (320, 64, "float32", True, False, "K"),
    (256, 384, "float8", True, True, "K"),
    (256, 384, "float8", False, False, "N"),
]


def _splits(operator: str, world_size: int) -> object:
    """Uneven, and a rank without rows."""
    rows = [300, 0, 129, 71, 5, 0, 64, 17][:world_size]
    return [rows[s:] + rows[:s] for s in range(world_size)] if operator == "gemm_all_to_all" else rows


def _calls(operator: str, world_size: int) -> list[Call]:
    calls = []
    for impl in IMPLS[operator]:
        for i, (columns, inner, dtype, bias, given, along) in enumerate(KINDS):
            given = given and operator != "gemm_all_reduce"
            splits = _splits(operator, world_size) if given else None
            rows = sum(splits) if given and operator == "gemm_reduce_scatter" else 128 * world_size
            calls.append(Call(operator, rows, columns, inner, dtype, bias, splits, w_along=along, impl=impl, seed=i))
    return [call for call in calls if call.can_run]


def test_matches_float64(world_size: int, operator: str) -> None:
    calls = _calls(operator, world_size)
    check_all(calls, interlace.launch(run, world_size, calls, backend="cuda", timeout_s=200))


def _differentiate_all(calls: list[Call]) -> list[dict[str, torch.Tensor]]:
    return [differentiate(call) for call in calls]


def test_gradients(world_size: int, operator: str) -> None:
    calls = [call for call in _calls(operator, world_size) if call.dtype != "float8"]
    outcomes = interlace.launch(_differentiate_all, world_size, calls, backend="cuda", timeout_s=200)
    for i, call in enumerate(calls):
        # Longer sums than on the CPU: errors of many roundings grow with the root of their number.
        check_gradients(call, [rank[i] for rank in outcomes], factor=math.sqrt(call.inner + 128 * world_size))


def _compile(call: Call) -> list[list[torch.Tensor]]:
    return [[tensor.cpu() for tensor in outcome] for outcome in compiled(call)]


def test_compiles_into_one_graph(world_size: int, operator: str) -> None:
    for impl in IMPLS[operator]:
        call = dataclasses.replace(_calls(operator, world_size)[0], impl=impl)
        for eager, graph in interlace.launch(_compile, world_size, call, backend="cuda", timeout_s=200):
            torch.testing.assert_close(graph, eager)
