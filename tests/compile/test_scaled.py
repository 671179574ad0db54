"""Products of float8 before a collective become operators with their scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from interlace.compile import fuse
from interlace.gemm.operands import FLOAT8
from interlace.gemm.scaled import block_scale_shapes, dequantised
from tests.compile.norms import rms
from tests.compile.programs import (
    all_gather,
    all_reduce,
    all_to_all,
    fused,
    operators,
    reduce_scatter,
    traced,
)

M, K, N = 128, 256, 48

Program = Callable[..., torch.Tensor]

SENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gemm_all_reduce": all_reduce,
    "gemm_reduce_scatter": reduce_scatter,
    "gemm_all_to_all": all_to_all,
}


def _operands(kind: str) -> list[torch.Tensor]:
    """X, w and their scales, other ones on each rank, as torch's product takes them."""
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    x, w = (torch.randn(rows, K, generator=generator).to(FLOAT8) for rows in (M, N))
    of_x, of_w = {
        "matrix": ((), ()),
        "rows": ((M, 1), (1, N)),
        "blocks": block_scale_shapes(x, w),
    }[kind]
    x_scale, w_scale = (torch.rand(shape, generator=generator) + 0.5 for shape in (of_x, of_w))
    if kind == "blocks":
        # What cuBLAS reads along rows of x, and along K of w.
        return [x, w, x_scale.T.contiguous().T, w_scale.T]
    return [x, w, x_scale, w_scale]


def _multiply(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    y: torch.Tensor = torch._scaled_mm(x, w.t(), x_scale, w_scale, out_dtype=torch.bfloat16)
    return y


def _fused_products(kind: str) -> dict[str, tuple[list[str], float]]:
    """The operators that each pair becomes, and how far the results are off."""
    outcomes = {}
    for name, send in SENT.items():
        arguments = _operands(kind)
        module = traced(lambda *operands, send=send: send(_multiply(*operands)), arguments)
        if kind != "blocks":
            names, _, error = fused(module, arguments)
            outcomes[name] = names, error
            continue
        # Without a GPU torch has no such product, so the operators are held against float32.
        fuse(module.graph)
        module.recompile()
        x, w, x_scale, w_scale = arguments
        part = dequantised(x, x_scale, 1) @ dequantised(w, w_scale.T, 128).T
        exact, found = send(part), module(*arguments).float()
        outcomes[name] = operators(module), float((found - exact).norm() / exact.norm())
    return outcomes


@pytest.mark.parametrize("kind", ["matrix", "rows", "blocks"])
def test_products_of_float8_become_operators(ranks: Any, kind: str) -> None:
    for outcomes in ranks(2).run(_fused_products, kind):
        assert {name: names for name, (names, _) in outcomes.items()} == {
            name: [name] for name in SENT
        }
        # Parts and sums are rounded to bfloat16, by truncation in the interpreter.
        assert {name: error for name, (_, error) in outcomes.items() if not error < 2**-6} == {}


def _normed() -> tuple[list[str], float]:
    """What a product of float8 with a residual and a norm behind its sum becomes, and the error."""
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(M, N, generator=generator).bfloat16()
    weight = torch.randn(N, generator=generator).bfloat16()
    arguments = [*_operands("rows"), residual, weight]

    def program(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *operands, residual, weight = given
        total = residual + all_reduce(_multiply(*operands))
        return total, rms(total, weight)

    names, _, error = fused(traced(program, arguments), arguments)
    return names, error


def test_a_norm_behind_the_sum_is_part_of_the_operator(ranks: Any) -> None:
    for names, error in ranks(2).run(_normed):
        assert names == ["gemm_all_reduce_norm"]
        assert error < 2**-6


def _sum_of_products(x: torch.Tensor, w: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    return all_reduce(_multiply(x, w, *scales) + _multiply(x, w, *scales))


LEFT: dict[str, tuple[str, Program, str]] = {
    "a sum": ("rows", _sum_of_products, "is a part of a sum, and has scales of its own"),
    "rows that move": (
        "rows",
        lambda *operands: reduce_scatter(
            _multiply(*operands).view(2, M // 2, N).transpose(0, 1).reshape(M, N)
        ),
        "moves rows that have scales of their own",
    ),
    "a wider result": (
        "matrix",
        lambda x, w, *scales: all_reduce(
            torch._scaled_mm(x, w.t(), *scales, out_dtype=torch.float32)
        ),
        "operators multiply torch.float8_e4m3fn into torch.bfloat16",
    ),
    "gathered rows": (
        "matrix",
        lambda x, w, *scales: _multiply(all_gather(x.view(torch.uint8)).view(FLOAT8), w, *scales),
        "",
    ),
}


def _left() -> dict[str, tuple[str, list[str]]]:
    reasons = {}
    for name, (kind, program, _) in LEFT.items():
        module = traced(program, _operands(kind))
        (finding,) = fuse(module.graph)
        reasons[name] = finding.reason, operators(module)
    return reasons


def test_others_are_left_alone_and_say_why(ranks: Any) -> None:
    for reasons in ranks(2).run(_left):
        for name, (reason, names) in reasons.items():
            assert names == [], name
            assert LEFT[name][2] in reason, (name, reason)
