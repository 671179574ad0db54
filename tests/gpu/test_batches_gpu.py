"""Batches of products before and after an all-to-all of their rows. Run with ``-m gpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.operators  # registers torch.ops.interlace
from tests.gpu.absent import call_without

pytestmark = pytest.mark.gpu

# Products, rows for each rank, inner size, columns: whole tiles and not.
SHAPES = [(2, 256, 512, 1024), (3, 130, 200, 136), (8, 128, 256, 512), (2, 1, 64, 64)]


def _differing(found: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(
        [(one != other).sum() for one, other in zip(found, expected, strict=True)]
    ).sum()


def _repeated(
    turns: int, make: Callable[[], list[torch.Tensor]], expected: list[torch.Tensor]
) -> int:
    """Elements of what ``make`` makes that differ from those expected: with late ranks, then in a
    graph.
    """
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(turns):
        if (turn + dist.get_rank()) % 5 == 0:
            torch.cuda._sleep(500_000)
        wrong = wrong + _differing(make(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = make()
    for _ in range(turns):
        graph.replay()
        wrong = wrong + _differing(captured, expected)
    interlace.synchronize()
    return int(wrong)


def _long_run(turns: int, impl: str) -> tuple[float, int, int]:
    """What differs from the fused kernel for each product: the relative error, and elements.

    Then elements that differ from the first results, with late ranks and in a graph.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(rank)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    calls, expected, worst = [], [], 0.0
    differs = torch.zeros((), dtype=torch.int64, device="cuda")
    for which, (count, rows, inner, columns) in enumerate(SHAPES):
        x = torch.randn(count, rows * ranks, inner, generator=generator, device="cuda").bfloat16()
        w = torch.randn(count, columns, inner, generator=generator, device="cuda").bfloat16()
        batch = w.mT if which % 2 else w.mT.contiguous()
        y = torch.ops.interlace.bmm_all_to_all(x, batch, name, impl).clone()
        single = [
            interlace.gemm_all_to_all(x[i], w[i], impl="fused").clone().view(ranks, rows, columns)
            for i in range(count)
        ]
        found, wanted = y.view(ranks, count, rows, columns), torch.stack(single, 1)
        worst = max(
            worst, float((found.double() - wanted.double()).norm() / wanted.double().norm())
        )
        differs = differs + (found != wanted).sum()
        calls.append((x, batch))
        expected.append(y)
    call = torch.ops.interlace.bmm_all_to_all
    return (
        worst,
        int(differs),
        _repeated(turns, lambda: [call(x, w, name, impl) for x, w in calls], expected),
    )


@pytest.mark.parametrize("impl", ["fused", "chunked"])
def test_batches_sent(ranks: Any, world_size: int, turns: Any, impl: str) -> None:
    for worst, differs, wrong in ranks(world_size).run(_long_run, turns(200), impl):
        assert worst < 0.01
        assert wrong == 0
        assert differs == 0 or impl == "chunked"  # which adds up in another order


def _sums(turns: int) -> tuple[float, int]:
    """The largest relative error of sums of two batches; elements that differ from the first
    results, as above.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(rank)
    assert dist.group.WORLD is not None
    call, name = torch.ops.interlace.bmm_sum_all_to_all, dist.group.WORLD.group_name
    calls, expected, worst = [], [], 0.0
    for count, rows, inner, columns in SHAPES:
        x = [
            torch.randn(count, rows * ranks, k, generator=generator, device="cuda").bfloat16()
            for k in (inner, 64)
        ]
        w = [
            torch.randn(count, k, columns, generator=generator, device="cuda").bfloat16()
            for k in (inner, 64)
        ]
        y = call(x, w, name).clone()
        total = sum(
            (torch.bmm(one.double(), other.double()) for one, other in zip(x, w, strict=True)),
            start=torch.zeros(1).cuda(),
        )
        sent = total.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        wanted = torch.empty_like(sent)
        dist.all_to_all_single(wanted, sent)
        worst = max(worst, float((y.double().view(wanted.shape) - wanted).norm() / wanted.norm()))
        calls.append((x, w))
        expected.append(y)
    return worst, _repeated(turns, lambda: [call(x, w, name) for x, w in calls], expected)


def test_sums_of_batches_sent(ranks: Any, world_size: int, turns: Any) -> None:
    for worst, wrong in ranks(world_size).run(_sums, turns(200)):
        assert worst < 0.01
        assert wrong == 0


def _received(x: torch.Tensor, count: int) -> torch.Tensor:
    """``[B, R C, K]``, by an all-to-all."""
    rows = torch.empty_like(x)
    dist.all_to_all_single(rows, x)
    return rows.view(dist.get_world_size(), count, -1, x.shape[1]).transpose(0, 1).flatten(1, 2)


def _arriving(impl: str, turns: int) -> tuple[int, float, int]:
    """Rows that differ from those sent, the largest relative error, elements that differ from the
    first results; as above.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(rank)
    assert dist.group.WORLD is not None
    call, name = torch.ops.interlace.all_to_all_bmm, dist.group.WORLD.group_name
    calls, expected, worst = [], [], 0.0
    differs = torch.zeros((), dtype=torch.int64, device="cuda")
    for which, (count, share, inner, columns) in enumerate(SHAPES):
        x = torch.randn(ranks * count * share, inner, generator=generator, device="cuda").bfloat16()
        w = torch.randn(count, columns, inner, generator=generator, device="cuda").bfloat16()
        batch = w.mT if which % 2 else w.mT.contiguous()
        y, rows = call(x, batch, name, impl)
        sent = _received(x, count)
        wanted = torch.bmm(sent.double(), batch.double())
        worst = max(worst, float((y.double() - wanted).norm() / wanted.norm()))
        differs = differs + (rows != sent).sum()
        calls.append((x, batch))
        expected += [y, rows]
    wrong = _repeated(
        turns, lambda: [each for x, w in calls for each in call(x, w, name, impl)], expected
    )
    return int(differs), worst, wrong


@pytest.mark.parametrize("impl", ["chunked", "pushed"])
def test_batches_received(ranks: Any, world_size: int, turns: Any, impl: str) -> None:
    for differs, worst, wrong in ranks(world_size).run(_arriving, impl, turns(200)):
        assert (differs, wrong) == (0, 0)
        assert worst < 0.01


def _without_a_peer(impl: str) -> tuple[str, int, float, bool] | None:
    x, w = torch.ones(512, 256, device="cuda"), torch.ones(2, 256, 128, device="cuda")
    call = torch.ops.interlace.all_to_all_bmm
    return call_without(1, lambda group: call(x, w, group.group_name, impl)[0])


@pytest.mark.parametrize("impl", ["chunked", "pushed"])
def test_a_peer_that_never_calls(ranks: Any, impl: str) -> None:
    """All is NaN: what is there could be of another call."""
    assert ranks(2).run(_without_a_peer, impl)[0] == ("PeerTimeoutError", 1, 1.0, True)
