"""Memory that comes back, captures beside garbage, devices, streams, groups that recover. Run with
``-m gpu``.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm.replay.memory import releases

pytestmark = pytest.mark.gpu

MIB = 2**20


def _operands(rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randint(-4, 5, (rows, 128), generator=generator, device=device)
    return x.bfloat16(), torch.ones(256, 128, dtype=torch.bfloat16, device=device)


def _expected(x: torch.Tensor) -> torch.Tensor:
    """The product of ``x`` with ones, summed over ranks. By Gloo: it must not depend on NCCL."""
    total = x.float().sum(1, keepdim=True).cpu()
    dist.all_reduce(total)
    return total.to(x.device).expand(-1, 256)


def _groups_come_and_go(release: bool) -> tuple[list[bool], float, float]:
    """Groups with 256 MiB each: which are alive afterwards, and how much less memory is free after
    the last than the first.
    """
    alive, free = [], []
    for _ in range(6):
        process_group = dist.new_group()
        group = weakref.ref(interlace.group_of(process_group))
        symmetric = interlace.empty_symmetric((256 * MIB,), dtype=torch.uint8, group=process_group)
        x, w = _operands()
        for _ in range(3):
            for impl in ("fused", "chunked"):
                interlace.gemm_reduce_scatter(x, w, group=process_group, impl=impl)
            interlace.gemm_all_reduce(x, w, group=process_group, impl="remote_stores")
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))
        del symmetric
        if release:
            group().release()
        dist.destroy_process_group(process_group)
        del process_group
        gc.collect()
        releases.empty()
        torch.cuda.empty_cache()
        dist.all_reduce(torch.zeros(1))  # peers have unmapped this rank's memory, too
        alive.append(group() is not None)
        free.append(torch.cuda.mem_get_info()[0] / MIB)
    return alive, free[1] - free[-1], len(releases)


@pytest.mark.alone  # other tests take and free memory of the same GPUs
@pytest.mark.parametrize("release", [False, True])
def test_memory_of_groups_that_are_gone_is_free(
    ranks: Callable[[int], Any], world_size: int, release: bool
) -> None:  # fmt: skip
    """Ranks that share a GPU see each other's memory; 128 MiB allow for what the driver keeps."""
    for alive, lost, pending in ranks(world_size).run(_groups_come_and_go, release):
        assert alive == [False] * 6
        assert lost < 128
        assert pending == 0


class _Cycle:
    """Garbage that only the collector ends, with symmetric memory."""

    def __init__(self) -> None:
        self.myself, self.memory = self, interlace.empty_symmetric((MIB,), dtype=torch.uint8)


def _garbage_during_captures() -> tuple[bool, int, int]:
    x, w = _operands()
    expected = _expected(x)
    gc.collect()  # what other tests have left, errors with all their frames, holds such memory, too
    interlace.gemm_all_reduce(x, w, impl="fused")
    cycle = _Cycle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = interlace.gemm_all_reduce(x, w, impl="fused")
        del cycle
        gc.collect()
        pending = len(releases)
        again = interlace.gemm_all_reduce(x, w, impl="fused")
    graph.replay()
    right = torch.equal(y.float(), expected) and torch.equal(again.float(), expected)
    for _ in range(4):  # becomes a graph of the group's replays, during which nothing is collected
        _Cycle()
        gc.set_threshold(1)
        z = interlace.gemm_all_reduce(x, w, impl="chunked")
        gc.set_threshold(700, 10, 10)
        right &= torch.equal(z.float(), expected)
    interlace.synchronize()
    gc.collect()
    interlace.gemm_all_reduce(x, w, impl="fused")
    return right, pending, len(releases)


def test_garbage_does_not_disturb_captures(ranks: Callable[[int], Any], world_size: int) -> None:
    assert ranks(world_size).run(_garbage_during_captures) == [(True, 1, 0)] * world_size


def _on_another_gpu() -> bool:
    """Every rank computes on its own GPU while the next one is current."""
    own = torch.cuda.current_device()
    x, w = _operands()
    expected = _expected(x)
    group = interlace.group_of(None, x.device)
    torch.cuda.set_device((own + 1) % torch.cuda.device_count())
    try:
        right = True
        for _ in range(3):
            for impl in ("fused", "remote_stores", "chunked"):
                y = interlace.gemm_all_reduce(x, w, impl=impl)
                right &= torch.equal(y.float(), expected)
        right &= torch.equal(interlace.gemv_all_reduce(x[:2], w, impl="gemv").float(), expected[:2])
        group.synchronize()
    finally:
        torch.cuda.set_device(own)
    return right


def test_operators_run_where_their_tensors_are(
    ranks: Callable[[int], Any], world_size: int
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there must be two GPUs")
    assert ranks(world_size).run(_on_another_gpu) == [True] * world_size


def _two_groups_on_two_streams(turns: int) -> bool:
    groups, streams = [dist.new_group() for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    x, w = _operands(4096)
    expected = _expected(x)
    torch.cuda.synchronize()
    right = torch.ones((), dtype=torch.bool, device="cuda")
    for turn in range(turns):
        for group, stream in zip(groups, streams, strict=True):
            with torch.cuda.stream(stream):
                if (turn + dist.get_rank()) % 2:
                    torch.cuda._sleep(20_000)
                y = interlace.gemm_all_reduce(x, w, group=group, impl="fused")
                same = (y.float() == expected).all()
            torch.cuda.current_stream().wait_stream(stream)
            right &= same
    for group in groups:
        interlace.synchronize(group)
    return bool(right)


def test_groups_on_two_streams_follow_each_other(
    ranks: Callable[[int], Any], world_size: int
) -> None:
    assert ranks(world_size).run(_two_groups_on_two_streams, 20) == [True] * world_size


def _recovers(times: int) -> tuple[list[bool], list[bool]]:
    """The last rank comes late; then all recover, with outputs alive, and capture a graph anew."""
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    deadline_s = group.deadline_s
    x, w = _operands()
    expected, last = _expected(x), group.rank == group.world_size - 1
    implementations = ("fused", "remote_stores", "chunked")

    def call(impl: str) -> torch.Tensor:
        return interlace.gemm_all_reduce(x, w, group=process_group, impl=impl)

    kept = [call(impl) for impl in implementations for _ in range(3)]
    group.synchronize()
    failed, right = [], []
    for _ in range(times):
        interlace.set_deadline(1.0, process_group)
        if last:
            time.sleep(3.0)
        try:
            call("fused")
            group.synchronize()
        except interlace.PeerTimeoutError:
            pass
        failed.append(group.broken or last)
        interlace.set_deadline(deadline_s, process_group)
        interlace.recover(process_group)
        results = [call(impl) for impl in implementations for _ in range(3)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call("fused")
        for _ in range(3):
            graph.replay()
            results += [captured.clone(), call("fused")]
        group.synchronize()
        right.append(all(torch.equal(y.float(), expected) for y in [*kept, *results]))
    return failed, right


def test_a_broken_group_recovers(ranks: Callable[[int], Any], world_size: int) -> None:
    assert ranks(world_size).run(_recovers, 2) == [([True] * 2, [True] * 2)] * world_size


def _nccl() -> list[float]:
    """Collectives of torch on GPUs, which ranks may share."""
    x = torch.full((1000,), dist.get_rank() + 1.0, device="cuda")
    dist.all_reduce(x)
    received = torch.empty(dist.get_world_size(), device="cuda")
    dist.all_gather_into_tensor(received, torch.full((1,), float(dist.get_rank()), device="cuda"))
    return [x[0].item(), *received.tolist()]


def test_nccl_beside_the_operators(ranks: Callable[[int], Any], world_size: int) -> None:
    total = world_size * (world_size + 1) / 2
    assert ranks(world_size).run(_nccl) == [[total, *map(float, range(world_size))]] * world_size
