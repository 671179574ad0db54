"""The loss over a sharded vocabulary on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from interlace.testing.cases import losses

pytestmark = pytest.mark.gpu

# Rows, width, columns of a rank: a row in one step of the kernel, in several, and in many by more
# warps; rows that are not aligned.
SIZES = ((7, 64, 100), (130, 256, 5000), (40, 128, 40000), (33, 64, 4099))


def _wrong(dtype: str) -> list[str]:
    """The cases of which a result of this rank is wrong."""
    found = []
    for number, (rows, hidden, columns) in enumerate(SIZES):
        for reduction in losses.REDUCTIONS:
            case = losses.LossCase(
                losses.OPERATOR, "fused", dtype, True, rows, hidden, columns,
                bias=number % 2 == 1, smoothing=0.1 * (number % 3), reduction=reduction,
                sharded=number == 2,
            )  # fmt: skip
            if any(case.prepare().check()):
                found.append(case.label)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_matches_float64(ranks: Any, world_size: int, dtype: str) -> None:
    assert ranks(world_size).run(_wrong, dtype) == [[]] * world_size


def _operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks, source = dist.get_world_size(), torch.Generator().manual_seed(5)
    x = torch.randn(96, 128, generator=source).bfloat16().cuda()
    target = torch.randint(0, 1000 * ranks, (96,), generator=source).cuda()
    w = torch.randn(1000 * ranks, 128, generator=source).bfloat16()
    return x, w.chunk(ranks)[dist.get_rank()].cuda(), target


def _both(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
    loss = interlace.linear_cross_entropy(*leaves, target, chunk_rows=40)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def _captured() -> list[bool]:
    """Whether replays of a graph have the bits of eager calls, with other operands each time."""
    x, w, target = _operands()
    _both(x, w, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _both(x, w, target)
    same = []
    for turn in range(4):
        x.add_(0.25 * turn)
        target.copy_(target.roll(1))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [each.clone() for each in results]
        same += [a.equal(b) for a, b in zip(replayed, _both(x, w, target), strict=True)]
    return same


def test_graphs(ranks: Any, world_size: int) -> None:
    assert ranks(world_size).run(_captured) == [[True] * 12] * world_size


def _scaled() -> list[float]:
    """Distances of gradients that the loss's own has multiplied, in place and not."""
    x, w, target = _operands()
    leaves = x.requires_grad_(), w.requires_grad_()
    loss = interlace.linear_cross_entropy(*leaves, target)
    kept = torch.autograd.grad(loss, leaves, torch.tensor(3.0, device="cuda"), retain_graph=True)
    last = torch.autograd.grad(loss, leaves, torch.tensor(3.0, device="cuda"))
    return [float((a - b).abs().max()) for a, b in zip(kept, last, strict=True)]


def test_gradients_are_multiplied_in_their_own_memory(ranks: Any, world_size: int) -> None:
    assert ranks(world_size).run(_scaled) == [[0.0, 0.0]] * world_size


def _memory() -> tuple[int, int]:
    """Bytes that a call takes at its peak beside its gradients, and those of all logits."""
    rows, hidden, columns = 4096, 256, 16384
    x = torch.randn(rows, hidden, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(columns, hidden, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(0, columns, (rows,), device="cuda")
    for _ in range(2):
        x.grad = w.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        interlace.linear_cross_entropy(x, w, target, chunk_rows=512).backward()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return peak - x.nbytes - w.nbytes, 2 * rows * columns


def test_memory_is_that_of_a_chunk(ranks: Any, world_size: int) -> None:
    for taken, of_all_logits in ranks(world_size).run(_memory):
        # An eighth of them, and the parts of x's gradient.
        assert taken < of_all_logits / 4


def _compiled() -> list[float]:
    x, w, target = _operands()

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return interlace.linear_cross_entropy(x * 2, w, target)

    leaves = x.requires_grad_(), w.requires_grad_()
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    return [float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)]


def test_inductor(ranks: Any, world_size: int) -> None:
    for distances in ranks(world_size).run(_compiled, timeout_s=600.0):
        assert max(distances) < 1e-3


def _beside_all_logits() -> float:
    """The largest distance of a loss from that of logits in float32."""
    x, w, target = _operands()
    losses = interlace.linear_cross_entropy(x, w, target, reduction="none")
    ranks = [torch.empty_like(w.cpu()) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, w.cpu())
    logits = F.linear(x.float(), torch.cat(ranks).cuda().float())
    wanted = F.cross_entropy(logits, target, reduction="none")
    return float((losses - wanted).abs().max())


def test_is_pytorchs_loss(ranks: Any, world_size: int) -> None:
    # Logits of some 30 are rounded to bfloat16.
    assert max(ranks(world_size).run(_beside_all_logits)) < 0.2
