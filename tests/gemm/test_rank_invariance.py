"""The same bits for 1, 2, 4 and 8 ranks (``interlace.batch_invariant(ranks=8)``).

The leaves of K have integer products of very different sizes. So a leaf's own sum is exact in any
order, and what the test sees is the order in which leaves and ranks are added, and the rounding on
the way: what Interlace decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.gemm import invariance
from interlace.gemm.operator import GemmOperator
from interlace.tuning.choice import Choice
from tests.gemm.row_calls import bits

LEAVES, LEAF, COLUMNS = 8, 48, 24
WORLD_SIZES = (1, 2, 4, 8)
BATCHES = (1, 3, 16, 40)
"""Rows of the calls: of those that may, up to 3 run by ``gemv``, and up to 16 by ``pushed``."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """All of x, weight, bias and residual."""
    generator = torch.Generator().manual_seed(0)
    # Of size 2, 3, 4.5, ...: float32 keeps each leaf's sum whole, and no sum of two leaves.
    scale = (1.5 ** torch.arange(LEAVES)).repeat_interleave(LEAF)
    x = torch.randint(-8, 9, (max(BATCHES), LEAVES * LEAF), generator=generator) * scale
    w = torch.randint(-8, 9, (COLUMNS, LEAVES * LEAF), generator=generator) / 64
    bias = torch.randn(COLUMNS, generator=generator)
    residual = torch.randn(max(BATCHES), COLUMNS, generator=generator)
    return tuple(each.to(dtype) for each in (x, w, bias, residual))


def _shards(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """This rank's columns of x and of the weight; all of bias and residual."""
    x, w, bias, residual = _operands(dtype)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cut = lambda each: each.tensor_split(ranks, 1)[rank].contiguous()  # noqa: E731
    return cut(x), cut(w), bias, residual


def _gathered(y: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, in rank order."""
    rows = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(rows, y)
    return torch.cat(rows)


def _normed(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> Any:
    results = interlace.gemm_all_reduce(
        x, w, bias, residual=residual, norm_weight=bias, norm="layer"
    )
    return torch.cat([results.y, results.residual], 1)


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CALLS: dict[str, Run] = {
    "gemm_all_reduce": lambda x, w, bias, _: interlace.gemm_all_reduce(x, w, bias),
    "without bias": lambda x, w, *_: interlace.gemm_all_reduce(x, w),
    "along N": lambda x, w, *_: interlace.gemm_all_reduce(x, w.T.contiguous().T),
    "gemv_all_reduce": lambda x, w, bias, _: interlace.gemv_all_reduce(x, w, bias),
    "gemm_reduce_scatter": lambda x, w, bias, _: _gathered(
        interlace.gemm_reduce_scatter(x, w, bias)
    ),
    "norm": _normed,
}


def _found(name: str, dtype: torch.dtype, hands_over: bool) -> dict[int, torch.Tensor]:
    """The bits of every batch. With ``hands_over`` kernels change with the number of rows, as on a
    GPU with one arithmetic.
    """
    x, w, bias, residual = _shards(dtype)
    free_choice = GemmOperator.choose

    def choose(declaration: GemmOperator, *, rows: int, **call: Any) -> Choice[Any]:
        order = ["gemv"] * (rows <= 3) + ["pushed"] * (rows <= 16) + ["fused"]
        choice = free_choice(declaration, rows=rows, **call)
        return dataclasses.replace(choice, impl=order[0], times_us=dict.fromkeys(order, 1.0))

    with pytest.MonkeyPatch.context() as patch, interlace.batch_invariant(ranks=LEAVES):
        if hands_over:
            patch.setattr(invariance, "has_one_arithmetic", lambda *_: True)
            patch.setattr(GemmOperator, "choose", choose)
        interlace.group_of().release()
        found = {
            rows: bits(CALLS[name](x[:rows].contiguous(), w, bias, residual[:rows]))
            for rows in BATCHES
        }
    interlace.group_of().release()
    return found


@pytest.mark.parametrize("hands_over", [False, True], ids=["one kernel", "all kernels"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_ranks_have_the_same_bits(
    ranks: Any, name: str, dtype: str, hands_over: bool
) -> None:
    found = {size: ranks(size).run(_found, name, DTYPES[dtype], hands_over) for size in WORLD_SIZES}
    wanted = found[1][0][max(BATCHES)]
    for size, results in found.items():
        for rank, result in enumerate(results):
            for rows, y in result.items():
                assert torch.equal(y, wanted[:rows]), f"rank {rank} of {size}, {rows} rows"
