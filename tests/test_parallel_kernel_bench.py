"""The solutions of ParallelKernelBench, without that bench: they can be imported, and some of them
compute what a line of PyTorch does on all ranks' inputs.
"""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench import exchange
from benchmarks.parallel_kernel_bench.harness import (
    difference,
    first_tensor,
    lines_of,
    number_of,
    solution_of,
    stems,
)

RANKS = 2


def _of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def _all(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [_of(rank, *shape, dtype=dtype) for rank in range(RANKS)]


def _solve(rank: int, number: int, *arguments: Any, **more: Any) -> Any:
    """The result of a problem; its second call, in which the memory's other half has its turn."""
    stem = next(stem for stem in stems() if number_of(stem) == number)
    solution = solution_of(stem)
    solution(*arguments, **more)
    return solution(*arguments, **more)


def _collectives(rank: int = 0) -> None:
    parts = _all(6, 8)
    x = parts[rank]
    assert _solve(rank, 1, x).equal(parts[0] + parts[1])
    assert _solve(rank, 2, x).equal(torch.stack(parts))
    assert _solve(rank, 3, x, 1).equal(parts[1])
    assert _solve(rank, 6, x).equal(x if rank else torch.stack(parts))
    assert _solve(rank, 7, x).equal((parts[0] + parts[1]).chunk(2)[rank])
    assert _solve(rank, 8, x).equal(torch.cat([part.chunk(2)[rank] for part in parts]))
    heads = torch.cat([part.view(1, 6, 8, 1).chunk(2, 2)[rank] for part in parts], 1)
    assert _solve(rank, 36, x.view(1, 6, 8, 1), 1, 2).equal(heads)
    positions = torch.cat([part.view(1, 6, 8, 1).chunk(2, 1)[rank] for part in parts], 2)
    assert _solve(rank, 37, x.view(1, 6, 8, 1), 1, 2).equal(positions)


def _rows(rank: int) -> None:
    parts, splits = _all(5, 3, dtype=torch.bfloat16), ([2, 3], [1, 4])
    wanted = torch.cat([p.split(s)[rank] for p, s in zip(parts, splits, strict=True)])
    received = [split[rank] for split in splits]
    assert _solve(rank, 27, parts[rank], splits[rank], received).equal(wanted)
    table = torch.cat(parts)
    ids = torch.tensor([9, 0, 4, 5, 5, 3, 1])
    assert _solve(rank, 10, ids, parts[rank]).equal(table[[0, 4, 3, 1, 9, 5, 5]])
    width = torch.arange(10.0)[:, None]
    product = _solve(rank, 68, parts[rank], ids, torch.eye(3).bfloat16(), len(width))
    assert product.equal(table[ids])


def _fused(rank: int) -> None:
    parts, weight = _all(5, 8), _of(3, 16)
    whole = F.rms_norm(torch.cat(parts, 1), (16,), weight, 1e-5).chunk(2, 1)[rank]
    got = _solve(rank, 18, parts[rank], weight.chunk(2)[rank], 1e-5)
    torch.testing.assert_close(got, whole)
    target = torch.tensor([[3, 15, 0, 8, 7]])
    loss = F.cross_entropy(torch.cat(parts, 1), target[0], reduction="none")
    got = _solve(rank, 73, parts[rank][None].clone(), target)
    torch.testing.assert_close(got[0], loss)
    # Adam's first step is the sign of the gradient, times the learning rate.
    grad, shard, zeros = _of(rank, 12), _of(9, 24).chunk(2)[rank], torch.zeros(12)
    got = _solve(rank, 43, grad, shard, zeros, zeros, 0.1, 0.9, 0.99, 1e-8, 1)
    torch.testing.assert_close(got, _of(9, 24) - 0.1 * torch.cat(_all(12)).sign())


@pytest.mark.parametrize("worker", [_collectives, _rows, _fused])
def test_solutions_compute_what_pytorch_does(ranks, worker) -> None:
    ranks(RANKS).run(_on_rank, worker)


def _on_rank(worker: Any) -> None:
    worker(torch.distributed.get_rank())


def test_every_solution_can_be_imported_and_is_short() -> None:
    assert len({number_of(stem) for stem in stems()}) == len(stems()) >= 55
    for stem in stems():
        signature = inspect.signature(solution_of(stem))
        assert signature.return_annotation is not inspect.Signature.empty, stem
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, (stem, parameter)
        assert lines_of(stem) <= 75, stem


def test_results_are_compared_as_the_bench_does() -> None:
    ones = torch.ones(2, 3)
    assert difference((ones, {"a": 1}), [ones + 0.015, {"a": 1}]) == ""
    assert difference(ones, ones + 0.03) == "result: 6 of 6 differ, by up to 0.03"
    assert difference(ones, ones[0]) == "result: (3,) instead of (2, 3)"
    assert difference([ones, 1], [ones, 2]) == "result[1]: 2 instead of 1"
    assert difference(torch.tensor(1j), torch.tensor(0j)) != ""


def test_the_tensor_that_takes_turns_is_the_first_one() -> None:
    ones, twos = torch.ones(1), torch.full((1,), 2.0)
    tensor, replaced = first_tensor((1.0, ones, 3))
    assert tensor is ones
    assert replaced(twos) == (1.0, twos, 3)
    tensor, replaced = first_tensor(([ones, ones], 3))
    assert tensor is ones
    assert replaced(twos)[0][0] is twos


class _Replays:
    """Graphs as a group has them on a GPU, of which the second call with a key makes one."""

    def __init__(self, can_capture: bool) -> None:
        self.capturing, self.seen, self.can_capture = False, {}, can_capture

    def run(self, key: Any, enqueue: Any) -> bool:
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] > 2:
            return False
        self.capturing = self.seen[key] == 2
        try:
            enqueue()
            if self.capturing and not self.can_capture:
                raise RuntimeError("an operator that cannot be captured")
        finally:
            self.capturing = False
        return True


@pytest.mark.parametrize("can_capture", [True, False])
def test_a_replayed_solution_returns_copies_or_runs_launch_by_launch(
    monkeypatch, can_capture
) -> None:
    replays = _Replays(can_capture)
    group = SimpleNamespace(backend="cuda", replays=replays, running=contextlib.nullcontext)
    monkeypatch.setattr(exchange, "group_of", lambda process_group: group)
    calls = []

    @exchange.replayed
    def solution(x: torch.Tensor, more: float) -> tuple[torch.Tensor, None, torch.Size]:
        calls.append(x)
        return x + more, None, x.shape

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        return [solution(x, 1.0)[0] for _ in range(5)]

    ones = torch.ones(3)
    with contextlib.nullcontext() if can_capture else pytest.warns(UserWarning, match="captured"):
        found = results(ones)
    assert all(each.equal(ones + 1) for each in found)
    assert len({each.data_ptr() for each in found}) == 5
    assert len(calls) == (2 if can_capture else 6)
