"""A batch of products and the all-to-all of its rows, one process a GPU. Run with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.ops  # registers torch.ops.interlace

pytestmark = pytest.mark.gpu

# Products, rows for each rank, inner size, columns: whole tiles and not.
SHAPES = [(2, 256, 512, 1024), (3, 130, 200, 136), (8, 128, 256, 512), (2, 1, 64, 64)]


def _long_run(turns: int) -> tuple[int, int]:
    """Elements that differ from an operator for each product; then from the first results, with late ranks and in a graph."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(rank)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    calls, expected = [], []
    differs = wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for which, (count, rows, inner, columns) in enumerate(SHAPES):
        x = torch.randn(count, rows * ranks, inner, generator=generator, device="cuda").bfloat16()
        w = torch.randn(count, columns, inner, generator=generator, device="cuda").bfloat16()
        batch = w.mT if which % 2 else w.mT.contiguous()
        y = torch.ops.interlace.bmm_all_to_all(x, batch, name).clone()
        single = [interlace.gemm_all_to_all(x[i], w[i], impl="fused").clone().view(ranks, rows, columns) for i in range(count)]
        differs = differs + (y.view(ranks, count, rows, columns) != torch.stack(single, 1)).sum()
        calls.append((x, batch))
        expected.append(y)
    for turn in range(turns):
        if (turn + rank) % 5 == 0:
            torch.cuda._sleep(500_000)
        for (x, w), y in zip(calls, expected, strict=True):
            wrong = wrong + (torch.ops.interlace.bmm_all_to_all(x, w, name) != y).sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [torch.ops.interlace.bmm_all_to_all(x, w, name) for x, w in calls]
    for _ in range(turns):
        graph.replay()
    wrong = wrong + sum((found != y).sum() for found, y in zip(captured, expected, strict=True))
    interlace.synchronize()
    return int(differs), int(wrong)


def test_batches() -> None:
    for differs, wrong in interlace.launch(_long_run, torch.cuda.device_count(), 200, backend="cuda"):
        assert (differs, wrong) == (0, 0)
