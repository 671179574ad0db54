"""What moves a product's rows after it may as well move x's before it: any views, permutations,
splits, concatenations.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.compile import rows
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import Writer
from tests.compile.programs import traced

M, K, N = 24, 5, 7


def _moved(y: torch.Tensor, moves: list[tuple[str, int, int]]) -> torch.Tensor:
    """``y`` after some moves of its rows, each with two numbers that say which."""
    for kind, a, b in moves:
        leading = y.dim() - 1
        if kind == "unflatten":
            factors = [f for f in (2, 3, 4) if y.shape[a % leading] % f == 0] or [1]
            y = y.unflatten(a % leading, (factors[b % len(factors)], -1))
        elif kind == "flatten":
            y = y.flatten(min(a, b) % leading, leading - 1) if leading > 1 else y
        elif kind == "transpose":
            y = y.transpose(a % leading, b % leading)
        elif kind == "permute":
            order = list(range(leading))
            y = y.permute(*order[a % leading :], *order[: a % leading], leading)
        elif kind == "exchange":
            y = (
                torch.cat(y.chunk(2 + b % 2, a % leading), b % leading)
                if y.shape[a % leading] % 6 == 0
                else y
            )
        elif kind == "reverse":
            y = torch.cat(list(reversed(y.split(1 + b % 4, a % leading))), a % leading)
        elif kind == "unsqueeze":
            y = y.unsqueeze(a % (leading + 1))
        elif kind == "clone":
            y = y.contiguous()
    return y


KINDS = [
    "unflatten",
    "flatten",
    "transpose",
    "permute",
    "exchange",
    "reverse",
    "unsqueeze",
    "clone",
]
MOVES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 5)), max_size=6
)


@settings(max_examples=40)
@given(MOVES)
def test_moves_before_a_product_are_moves_after_it(moves: list[tuple[str, int, int]]) -> None:
    x, w = torch.arange(M * K).reshape(M, K).double(), torch.randn(N, K, dtype=torch.float64)

    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w.t()
        return _moved(y, moves), x.neg()  # what stands for x in the new graph

    module = traced(program, [x, w])
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    output = module.graph.output_node()
    after, before = output.args[0]
    writer = Writer(output, output)
    moved = rows.replay(writer, rows.region(product, after), product, before)
    assert moved.meta["val"].shape == (*after.meta["val"].shape[:-1], K)
    output.args = ([after, moved],)
    module.recompile()
    y, minus_x = module(x, w)
    assert torch.allclose(y, -minus_x @ w.t())
    assert math.prod(y.shape[:-1]) == M


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda y: y.flatten(), "cuts or reorders the columns"),
        (lambda y: y.t(), "comes between"),
        (lambda y: y.view(4, 6, N).permute(2, 0, 1), "cuts or reorders the columns"),
        (lambda y: y.view(4, 6, N).transpose(1, 2), "cuts or reorders the columns"),
        (lambda y: torch.cat(y.split(2, 1)[:3]), "cuts or reorders the columns"),
        (lambda y: torch.cat([y, y.neg()]), "neg comes between mm and cat"),
        (lambda y: y.unsqueeze(-1), "cuts or reorders the columns"),
        (lambda y: y.view(4, 6, N)[1], "comes between"),
        (lambda y: y[3:], "has only some rows of mm"),
    ],
)
def test_what_touches_columns_or_other_rows_is_refused(program: Any, reason: str) -> None:
    module = traced(lambda x, w: program(x @ w.t()), [torch.randn(M, K), torch.randn(N, K)])
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    with pytest.raises(LeftAlone, match=reason):
        rows.region(product, module.graph.output_node().args[0])
