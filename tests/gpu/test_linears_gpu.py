"""Products with one input in one kernel, on a GPU. Run with ``-m gpu``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from interlace.gemm.few_rows import FewRowsConfig
from interlace.operators.linears import multiply

pytestmark = pytest.mark.gpu

# Columns, rows of each weight: those of Llama 3 8B on two ranks, and some that no tile divides.
SHAPES = [(4096, (2048, 512, 512)), (4096, (7168, 7168)), (1000, (130, 6, 33)), (24, (5,))]


def _operands(
    tokens: int, columns: int, rows: tuple[int, ...], dtype: torch.dtype, bias: bool
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    generator = torch.Generator("cuda").manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    weights = [random(count, columns) for count in rows]
    return random(tokens, columns), weights, [random(count) if bias else None for count in rows]


def _error(
    results: list[torch.Tensor],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
) -> float:
    """The largest error against float64, in what roundings explain."""
    allowed = torch.finfo(x.dtype).eps + 8 * math.sqrt(x.shape[1]) * 2**-23
    errors = []
    for y, w, bias in zip(results, weights, biases, strict=True):
        exact = x.double() @ w.double().T + (0 if bias is None else bias.double())
        errors.append(float((y.double() - exact).norm() / exact.norm()) / allowed)
    return max(errors)


def _products(dtype: torch.dtype) -> dict[Any, float]:
    errors: dict[Any, float] = {}
    for columns, rows in SHAPES:
        for tokens, bias in (
            (1, False),
            (1, True),
            (7, True),
            (16, False),
            (33, True),
            (64, False),
        ):
            operands = _operands(tokens, columns, rows, dtype, bias)
            results = torch.ops.interlace.linears(*operands)
            errors[columns, tokens, bias] = _error(results, *operands)
            small = FewRowsConfig(columns=16, block_k=32, num_warps=2, num_stages=2)
            errors[columns, tokens, bias, "small"] = _error(multiply(*operands, small), *operands)
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products(ranks: Any, dtype: torch.dtype) -> None:
    (errors,) = ranks(1).run(_products, dtype)
    assert {case: error for case, error in errors.items() if not error < 1} == {}


def _in_a_graph() -> list[float]:
    """Errors of replays with other values in the same memory."""
    operands = _operands(4, 4096, (2048, 512, 512), torch.bfloat16, False)
    x = operands[0]
    torch.ops.interlace.linears(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = torch.ops.interlace.linears(*operands)
    errors = []
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        errors.append(_error(results, *operands))
    return errors


def test_cuda_graphs(ranks: Any) -> None:
    (errors,) = ranks(1).run(_in_a_graph)
    assert max(errors) < 1
