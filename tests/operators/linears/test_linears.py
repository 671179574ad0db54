"""``torch.ops.interlace.linears``: the products of a few tokens with up to three weights, in one
kernel, against ``torch.nn.functional.linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.errors import ArgumentError
from interlace.gemm.few_rows import FewRowsConfig
from interlace.operators.linears import multiply
from interlace.operators.linears.reference import linears as reference

TILES = FewRowsConfig(columns=16, block_k=16)
TILES_OF_ONE_TOKEN = FewRowsConfig(rows=1, columns=4, block_k=16)


def _operands(
    tokens: int, columns: int, rows: Sequence[int], dtype: torch.dtype, bias: bool
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    torch.manual_seed(tokens + columns)
    x = torch.randn(tokens, columns).to(dtype)
    weights = [torch.randn(count, columns).to(dtype) for count in rows]
    biases = [torch.randn(count).to(dtype) if bias else None for count in rows]
    return x, weights, biases


def _error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest error of the results, relative to their size."""
    assert [(y.shape, y.dtype) for y in found] == [(y.shape, y.dtype) for y in expected]
    errors = [
        (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-9)
        for a, b in zip(found, expected, strict=True)
    ]
    return float(max(errors))


def _of_tiles(dtype: torch.dtype) -> dict[Any, float]:
    """Errors with small tiles: tokens, rows of the weights, columns, biases."""
    cases = [
        (1, (8, 4, 4), 32, False),  # whole tiles
        (1, (7, 5, 2), 37, True),  # rows and columns that no tile divides
        (1, (9, 3), 5, True),  # fewer columns than a block
        (4, (8, 4, 4), 32, True),
        (3, (7, 5, 1), 37, False),
        (16, (4, 20), 16, True),
        (40, (70, 4), 33, True),  # several tiles of tokens
        (5, (6,), 18, True),
    ]
    errors: dict[Any, float] = {}
    for tokens, rows, columns, bias in cases:
        x, weights, biases = _operands(tokens, columns, rows, dtype, bias)
        found = multiply(x, weights, biases, TILES_OF_ONE_TOKEN if tokens == 1 else TILES)
        wide = [[None if e is None else e.double() for e in each] for each in (weights, biases)]
        exact = reference(x.double(), *wide)
        expected = [y.to(dtype) for y in exact]
        errors[tokens, rows, columns, bias] = _error(found, expected)
    return errors


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, marks=pytest.mark.quick), torch.float16, torch.float32],
)
def test_products(ranks: Any, dtype: torch.dtype) -> None:
    (errors,) = ranks(1).run(_of_tiles, dtype)
    # The interpreter truncates where it converts to bfloat16: up to a unit in the last place.
    assert max(errors.values()) < 2 * torch.finfo(dtype).eps, errors


def _other_operands() -> dict[str, float]:
    """Errors of the operator with operands that it copies or leaves to torch."""
    function = torch.ops.interlace.linears
    x, weights, biases = _operands(2, 24, (8, 4), torch.float32, True)
    many, *_ = _operands(65, 24, (), torch.float32, False)
    columns_first = [w.t().contiguous().t() for w in weights]
    wide = torch.randn(2, 48)[:, ::2]
    apart = [torch.stack([bias, bias / 0], -1)[:, 0] for bias in biases if bias is not None]
    calls = {
        "weights along n": (x, columns_first, biases),
        "columns of x apart": (wide, weights, biases),
        "rows of x apart": (torch.randn(2, 40)[:, :24], weights, biases),
        "elements of biases apart": (x, weights, apart),
        "many tokens": (many, weights, biases),
        "no tokens": (x[:0], weights, biases),
        "no columns": (x[:, :0], [w[:, :0] for w in weights], biases),
        "a weight without rows": (x, [weights[0][:0], weights[1]], [biases[0][:0], biases[1]]),
    }
    return {name: _error(function(*call), reference(*call)) for name, call in calls.items()}


def test_operands_that_are_copied_or_left_to_torch(ranks: Any) -> None:
    (errors,) = ranks(1).run(_other_operands)
    assert {name: error for name, error in errors.items() if not error < 1e-6} == {}


def _as_torch_wants() -> list[str]:
    x, weights, biases = _operands(2, 24, (8, 4, 3), torch.float32, True)
    outcomes = torch.library.opcheck(
        torch.ops.interlace.linears.default,
        (x, weights, biases),
        test_utils=("test_schema", "test_faketensor"),
    )
    return list(outcomes.values())


def test_schema_and_shapes(ranks: Any) -> None:
    assert ranks(1).run(_as_torch_wants) == [["SUCCESS", "SUCCESS"]]


X, W, B = torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(4)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((X, [], []), "weights must be 1 to 3"),
        ((X, [W] * 4, [None] * 4), "weights must be 1 to 3"),
        ((X, [W], []), "got 1 weights and 0 biases"),
        ((X[0], [W], [None]), "x must be [B, K]"),
        ((X.int(), [W], [None]), "x must be float16, bfloat16 or float32"),
        ((X, [W[:, :7]], [None]), "weights must be [N, K] with K = 8"),
        ((X, [W], [B[:3]]), "biases must be [N] with N = 4"),
        (
            (X, [W.half()], [None]),
            "weights must be torch.float32 on cpu, like x; got torch.float16",
        ),
        ((X, [W], [B.double()]), "biases must be torch.float32 on cpu, like x; got torch.float64"),
        ((X, [W, W], [B, None]), "for all weights or for none"),
    ],
)
def test_rejections(arguments: Any, rule: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        torch.ops.interlace.linears(*arguments)
    assert rule in str(raised.value)
