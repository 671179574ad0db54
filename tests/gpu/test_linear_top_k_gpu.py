"""The highest logits of a sharded vocabulary on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.testing.cases import choices

pytestmark = pytest.mark.gpu

# Rows, width, columns of a rank, k: one step of the kernel, and several; one row, and more than
# there are programs.
SIZES = ((1, 64, 100, 1), (300, 64, 5000, 1), (8, 128, 64128, 1), (64, 64, 4099, 64))


def _wrong() -> list[str]:
    """The cases of which a result of this rank is wrong."""
    cases = [
        choices.TopKCase(choices.OPERATOR, "fused", "float32", False, *sizes, bias=bias)
        for sizes in SIZES
        for bias in (False, True)
    ]
    return [case.label for case in cases for _ in range(2) if any(case.prepare().check())]


def test_is_topk_of_all_logits(ranks: Any, world_size: int) -> None:
    assert ranks(world_size).run(_wrong) == [[]] * world_size


def _captured() -> list[bool]:
    """Whether replays of a graph choose as eager calls do, of other operands each time."""
    source, count = torch.Generator().manual_seed(5), dist.get_world_size()
    x = torch.randn(4, 128, generator=source).bfloat16().cuda()
    w = torch.randn(2000 * count, 128, generator=source).bfloat16()
    own = w.chunk(count)[dist.get_rank()].cuda()
    interlace.linear_top_k(x, own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = interlace.linear_top_k(x, own)
    same = []
    for turn in range(4):
        x.copy_(x.roll(turn, 1))
        graph.replay()
        torch.cuda.synchronize()
        replayed = found.columns.clone()
        same.append(replayed.equal(interlace.linear_top_k(x, own).columns))
        same.append(replayed.equal(interlace.linear_top_k(x, own, impl="unfused").columns))
    return same


def test_graphs(ranks: Any, world_size: int) -> None:
    assert ranks(world_size).run(_captured) == [[True] * 8] * world_size
