"""Products between a sharded sequence and sharded columns on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.testing.cases.sequence import TO_COLUMNS, TO_ROWS, SequenceCase

pytestmark = pytest.mark.gpu

OPERATORS = (TO_COLUMNS, TO_ROWS)


def _wrong(operator: str) -> list[str]:
    """The cases of which a result of this rank is wrong: whole tiles through descriptors, rows and
    columns that end within tiles, and a rank without rows; gradients among the results.
    """
    ranks = dist.get_world_size()
    uneven = (0, 129, 40, 640, 1, 300, 17, 256)[:ranks]
    cases = [
        SequenceCase(operator, "fused", dtype, True, rows, head, other, bias, splits)
        for dtype, rows, head, other, bias, splits in (
            ("bfloat16", 512, 128, 1024, False, None),
            ("bfloat16", 300, 64, 512, True, None),
            ("float16", 0, 40, 264, True, uneven),
            ("float32", 0, 33, 65, True, uneven),
            ("bfloat16", 2048, 128, 2048, True, None),
        )
    ]
    return [case.label for case in cases for _ in range(2) if any(case.prepare().check())]


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_form_is_the_product_of_one_rank(ranks: Any, world_size: int, operator: str) -> None:
    assert ranks(world_size).run(_wrong, operator) == [[]] * world_size


def _many(operator: str) -> list[int]:
    """Which of many calls back to back differ from the first of their form, as a stale signal or
    row would make them.
    """
    group = interlace.group_of()
    calls = [
        SequenceCase(operator, "fused", "bfloat16", False, rows, 64, other).prepare()
        for rows, other in ((256, 512), (33, 256), (1024, 128))
    ]
    expected = [call.run()[0].clone() for call in calls]
    wrong = torch.zeros(300, dtype=torch.int64, device=group.device)
    for turn in range(len(wrong)):
        y = calls[turn % len(calls)].run()[0]
        wrong[turn] = (y != expected[turn % len(calls)]).sum()
        del y  # its memory is another call's
    group.synchronize()
    return wrong.nonzero().flatten().tolist()


@pytest.mark.alone
@pytest.mark.parametrize("operator", OPERATORS)
def test_many_calls_back_to_back(ranks: Any, world_size: int, operator: str) -> None:
    assert ranks(world_size).run(_many, operator) == [[]] * world_size


def _captured(operator: str) -> list[bool]:
    """Whether replays of a graph give what eager calls do, of other operands each time."""
    case = SequenceCase(operator, "fused", "bfloat16", False, 200, 64, 256, True)
    prepared = case.prepare(seeds=(0, 1, 2))
    prepared.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (replayed,) = prepared.run()
    same = []
    for variant in (1, 0, 2, 1):
        prepared.load(variant)
        graph.replay()
        torch.cuda.synchronize()
        found = replayed.clone()
        same.append(found.equal(prepared.run()[0]))
        wrong = torch.zeros(1, dtype=torch.int64, device=found.device)
        prepared.count_wrong([found], variant, wrong)
        same.append(int(wrong) == 0)
    return same


@pytest.mark.parametrize("operator", OPERATORS)
def test_graphs(ranks: Any, world_size: int, operator: str) -> None:
    assert ranks(world_size).run(_captured, operator) == [[True] * 8] * world_size


def _attention() -> list[float]:
    """Differences of the layer's output and gradients from those of the pair."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = interlace.nn.UlyssesAttention(
        512, 16, 2, 64, is_causal=True, device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(256 * ranks, 2, 512, device="cuda").bfloat16().chunk(ranks)[rank]
    found = []
    for impl in ("fused", "unfused"):
        layer.impl = impl
        own = x.clone().requires_grad_()
        y = layer(own)
        found.append([y, *torch.autograd.grad(y, [own, *layer.parameters()], torch.ones_like(y))])
    return [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(*found, strict=True)
    ]


def test_attention(ranks: Any, world_size: int) -> None:
    for differences in ranks(world_size).run(_attention):
        assert max(differences) < 0.02, differences
