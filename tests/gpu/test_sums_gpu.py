"""Sums of products in parts. Run with ``-m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.operators  # registers torch.ops.interlace

pytestmark = pytest.mark.gpu

# Rows a rank, columns, inner sizes: one piece a rank and two, columns that fill tiles and that do
# not.
SHAPES = [(512, 1024, (512, 256, 64)), (128, 513, (264, 520)), (1024, 4096, (128, 512))]


def _long_run(turns: int) -> tuple[float, int]:
    """The largest relative error; then elements that differ from the first results, with late ranks
    and single products between.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(rank)
    calls, expected, worst = [], [], 0.0
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    for rows, columns, inners in SHAPES:
        x = [
            torch.randn(rows * ranks, inner, generator=generator, device="cuda").bfloat16()
            for inner in inners
        ]
        w = [
            torch.randn(inner, columns, generator=generator, device="cuda").bfloat16().T
            for inner in inners
        ]
        y = torch.ops.interlace.gemm_sum_reduce_scatter(x, w, name)
        total = sum(
            (each.double() @ weight.double().T for each, weight in zip(x, w, strict=True)),
            start=torch.zeros(1).cuda(),
        )
        dist.all_reduce(total)
        wanted = total.chunk(ranks)[rank]
        worst = max(worst, float((y.double() - wanted).norm() / wanted.norm()))
        calls.append((x, w))
        expected.append(y)
    alone = interlace.gemm_reduce_scatter(*(part[0] for part in calls[0]), impl="chunked")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(turns):
        if (turn + rank) % 5 == 0:
            torch.cuda._sleep(500_000)
        for (x, w), y in zip(calls, expected, strict=True):
            wrong += (torch.ops.interlace.gemm_sum_reduce_scatter(x, w, name) != y).sum()
        wrong += (
            interlace.gemm_reduce_scatter(calls[0][0][0], calls[0][1][0], impl="chunked") != alone
        ).sum()
    interlace.synchronize()
    return worst, int(wrong)


def test_sums(ranks: Any, world_size: int, turns: Any) -> None:
    for worst, wrong in ranks(world_size).run(_long_run, turns(200)):
        assert worst < 0.01
        assert wrong == 0


def _chunks_in_a_row() -> float:
    """The largest relative error of calls one after another, whose kernel takes all SMs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    operands = [torch.randn(size, 2048, device="cuda").bfloat16() for size in (4096, 4096)]
    x, w = (operand / 8 for operand in operands)
    wanted = (x.double() @ w.double().T).chunk(ranks)[rank] * ranks
    results = [interlace.gemm_reduce_scatter(x, w, impl="chunked") for _ in range(24)]
    return max(float((y - wanted).norm() / wanted.norm()) for y in results)


def test_chunks_of_ranks_that_share_gpus(ranks: Any) -> None:
    """Copies within a GPU are kernels, and must have run before a kernel waits for the peers'."""
    assert max(ranks(2 * min(torch.cuda.device_count(), 4)).run(_chunks_in_a_row)) < 0.01
