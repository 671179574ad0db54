"""Who multiplies a rank's own rows in ``impl="chunked"``, and what the sum is then."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import interlace
from interlace.comm import Group
from interlace.gemm.operands import Operands
from interlace.operators.gemm_reduce_scatter import GemmReduceScatter, chunked
from interlace.tuning.gpu import Gpu

_MEASURED = (
    Path(__file__).parents[3] / "benchmarks/results/exploration/2026-11-28-own-rows-2xh200.json"
)
_H200 = Gpu("NVIDIA H200", 132, 227 << 10)


def test_the_faster_of_two_ways_is_taken() -> None:
    """Of all calls that were timed both ways on two H200s, but for those that differ by 2 %."""
    group = cast(Group, SimpleNamespace(backend="cuda", device=_H200, world_size=2))
    results = json.loads(_MEASURED.read_text(encoding="utf-8"))["results"]
    taken = {True: 0, False: 0}
    for result in results:
        times = result["times_us"]
        if "own rows by the library" not in times:
            continue
        rows, columns, inner = (result[name] for name in ("rows", "columns", "inner"))
        options: Any = {"dtype": torch.bfloat16, "device": "meta"}
        w = torch.empty(columns, inner, **options)
        if not result["w_along_k"]:
            w = torch.empty(inner, columns, **options).T
        product = Operands(torch.empty(rows, inner, **options), w, None, None, None, torch.bfloat16)
        choice = GemmReduceScatter().choose(
            rows=rows, columns=columns, inner=inner, dtype=torch.bfloat16, world_size=2,
            device=_H200, w_along_k=result["w_along_k"],
        )  # fmt: skip
        by_library = chunked._is_by_library([product], rows // 2, group, choice.config)
        kernel_us = times["own rows by the kernel"]
        library_us = times["own rows by the library"]
        if abs(library_us / kernel_us - 1) > 0.02:
            assert by_library == (library_us < kernel_us), result
            taken[by_library] += 1
    assert min(taken.values()) >= 4
    assert sum(taken.values()) >= 22


def _errors(rows: int) -> list[float]:
    group = interlace.group_of()
    ranks, errors = group.world_size, []
    generator = torch.Generator().manual_seed(rows)
    for dtype, has_bias in ((torch.float32, True), (torch.bfloat16, False)):
        everyones = torch.randn(ranks, rows, 24, generator=generator).to(dtype)
        weights = torch.randn(ranks, 40, 24, generator=generator).to(dtype)
        bias = torch.randn(80, generator=generator).to(dtype)[::2] if has_bias else None
        y = interlace.gemm_reduce_scatter(
            everyones[group.rank], weights[group.rank], bias, impl="chunked"
        )
        exact = torch.einsum("rmk,rnk->mn", everyones.double(), weights.double())
        exact = exact if bias is None else exact + bias.double()
        right = exact.tensor_split(ranks)[group.rank]
        assert y.shape == right.shape
        errors.append(((y.double() - right).norm() / right.norm().clamp(min=1e-30)).item())
    return errors


@pytest.mark.parametrize(("ranks_count", "rows"), [(2, 7), (2, 30), (3, 8), (3, 100), (4, 3)])
def test_sums_of_few_and_of_many_rows(ranks: Any, ranks_count: int, rows: int) -> None:
    """With fewer rows than a tile has, the library multiplies them; with four ranks and three rows
    one rank has none.
    """
    for in_float32, in_bfloat16 in ranks(ranks_count).run(_errors, rows):
        assert in_float32 < 1e-5
        assert in_bfloat16 < 8e-3
