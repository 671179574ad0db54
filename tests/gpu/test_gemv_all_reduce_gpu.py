"""``gemv_all_reduce`` on GPUs: compiled kernels. Run with ``-m gpu``.

Results are compared with float64 sums, and bit by bit where that is promised.
"""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import GemvAllReduceConfig, PeerTimeoutError

pytestmark = pytest.mark.gpu

CONFIGS = [
    GemvAllReduceConfig("one_shot", 4, 256, 1),
    GemvAllReduceConfig("one_shot", 16, 64, 4, 2, 3),
    GemvAllReduceConfig("two_phase", 16, 64, 4, 2, 3),
    GemvAllReduceConfig("two_phase", 64, 64, 4, 3),
]


def inputs(tokens, rows, columns, dtype, seed=0, bias=False):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + dist.get_rank())
    x = torch.randn(tokens, columns, generator=generator, device="cuda").to(dtype)
    w = torch.randn(rows, columns, generator=generator, device="cuda").to(dtype)
    b = (
        torch.randn(rows, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(
            dtype
        )
        if bias
        else None
    )
    return x, w, b


def expected(x, w, b=None):
    y = x.double() @ w.double().T
    dist.all_reduce(y)
    return y if b is None else y + b.double()


def relative_error(y, want):
    return float((y.double() - want).norm() / want.norm())


def bound(dtype, columns, world_size):
    """One rounding of the output, and float32 sums of K values and then of the ranks'."""
    return (
        torch.finfo(dtype).eps / 2
        + 4 * math.sqrt(columns * world_size) * torch.finfo(torch.float32).eps
    )


def _matches(dtype):
    found = []
    for config in CONFIGS:
        for tokens, rows, columns in ((1, 100, 200), (2, 512, 512), (17, 257, 130), (70, 320, 256)):
            x, w, b = inputs(tokens, rows, columns, dtype, bias=True)
            y = interlace.gemv_all_reduce(x, w, b, impl="gemv", config=config)
            error = relative_error(y, expected(x, w, b))
            found.append(
                (
                    str(config),
                    tokens,
                    rows,
                    columns,
                    error,
                    bound(dtype, columns, dist.get_world_size()),
                )
            )
    interlace.synchronize()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matches_float64(ranks, world_size, dtype):
    for rank in ranks(world_size).run(_matches, dtype):
        for *call, error, limit in rank:
            assert error <= limit, (call, error, limit)


def _long_run(calls):
    """Many calls back to back on alternating shapes, ranks held up at random; every result compared
    bit by bit.
    """
    rank = dist.get_rank()
    cases = []
    for tokens, rows, columns, config in (
        (1, 8192, 2048, GemvAllReduceConfig("one_shot", 4, 512, 1)),
        (2, 2048, 512, GemvAllReduceConfig("one_shot", 64, 128, 4, 3)),
        (8, 2048, 512, GemvAllReduceConfig("one_shot", 32, 128, 4, 3)),
        (1, 4096, 1024, GemvAllReduceConfig("one_shot", 4, 512, 1, 1, 512)),
        (16, 2048, 512, GemvAllReduceConfig("two_phase", 64, 128, 4, 3)),
        (64, 4096, 512, GemvAllReduceConfig("two_phase", 32, 128, 4, 3, 64)),
    ):
        x, w, _ = inputs(tokens, rows, columns, torch.bfloat16)
        first = interlace.gemv_all_reduce(x, w, impl="gemv", config=config)
        assert relative_error(first, expected(x, w)) <= bound(
            torch.bfloat16, columns, dist.get_world_size()
        )
        cases.append((x, w, config, first.clone()))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    delays = torch.Generator().manual_seed(rank)
    for call in range(calls):
        x, w, config, first = cases[call % len(cases)]
        if torch.rand((), generator=delays) < 0.05:
            torch.cuda._sleep(int(torch.randint(1000, 200_000, (), generator=delays)))
        y = interlace.gemv_all_reduce(x, w, impl="gemv", config=config)
        wrong += (y != first).any()
    interlace.synchronize()
    return int(wrong)


def test_ten_thousand_calls_with_random_delays(ranks, world_size, turns):
    assert ranks(world_size).run(_long_run, turns(10_000)) == [0] * world_size


def _graphs_and_streams(turns):
    torch._dynamo.reset()
    x, w, _ = inputs(1, 4096, 1024, torch.bfloat16)
    first = interlace.gemv_all_reduce(x, w, impl="gemv").clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [interlace.gemv_all_reduce(x, w, impl="gemv") for _ in range(3)]
    same = True
    for _ in range(turns):
        graph.replay()
        eager = interlace.gemv_all_reduce(x, w, impl="gemv")
        same &= all(torch.equal(y, first) for y in [*captured, eager])
    stream = torch.cuda.Stream()
    for _ in range(turns // 4):
        with torch.cuda.stream(stream):
            there = interlace.gemv_all_reduce(x, w, impl="gemv")
        here = interlace.gemv_all_reduce(x, w, impl="gemv")
    torch.cuda.synchronize()
    same &= torch.equal(here, first) and torch.equal(there, first)
    # The memory of a captured call outlives the growth of its workspace.
    big_x, big_w, _ = inputs(8, 16384, 64, torch.bfloat16)
    interlace.gemv_all_reduce(
        big_x, big_w, impl="gemv", config=GemvAllReduceConfig("one_shot", 32, 64, 4, 2)
    )
    graph.replay()
    torch.cuda.synchronize()
    same &= all(torch.equal(y, first) for y in captured)
    compiled = torch.compile(
        lambda a, b: interlace.gemv_all_reduce(a, b, impl="gemv") + 1, fullgraph=True
    )
    return same, torch.equal(compiled(x, w), first + 1)


def test_graphs_streams_and_compile(ranks, world_size, turns):
    assert ranks(world_size).run(_graphs_and_streams, turns(200)) == [(True, True)] * world_size


def _groups_and_memory():
    rank = dist.get_rank()
    pair = dist.new_group([0, dist.get_world_size() - 1])
    errors = []
    if rank in (0, dist.get_world_size() - 1):
        x, w, _ = inputs(1, 512, 256, torch.bfloat16)
        y = interlace.gemv_all_reduce(x, w, group=pair, impl="gemv")
        want = x.double() @ w.double().T
        dist.all_reduce(want, group=pair)
        errors.append(relative_error(y, want))
    x, w, _ = inputs(1, 512, 256, torch.bfloat16)
    want = expected(x, w)
    for _ in range(3):
        errors.append(relative_error(interlace.gemv_all_reduce(x, w, impl="gemv"), want))
        interlace.group_of().release()
    sym = interlace.empty_symmetric((4, 8), dtype=torch.float32)
    sym.peers[(rank + 1) % dist.get_world_size()].fill_(float(rank))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    return max(errors), sym.local[0, 0].item(), sym.peers.device.index


def test_subgroups_release_and_puts_by_assignment(ranks, world_size):
    for rank, (error, received, device) in enumerate(ranks(world_size).run(_groups_and_memory)):
        assert error <= bound(torch.bfloat16, 256, world_size)
        assert received == (rank - 1) % world_size
        assert device == rank % torch.cuda.device_count()


def _absent_peer(protocol, absent):
    group = dist.new_group()
    config = GemvAllReduceConfig(protocol, 16, 64, 4, 2)
    x, w, _ = inputs(1, 2048, 256, torch.bfloat16)
    interlace.gemv_all_reduce(x, w, group=group, impl="gemv", config=config)
    interlace.synchronize(group)
    interlace.set_deadline(1.0, group)
    dist.barrier()
    outcome = None
    if dist.get_rank() != absent:
        start = time.monotonic()
        y = interlace.gemv_all_reduce(x, w, group=group, impl="gemv", config=config)
        try:
            interlace.synchronize(group)
        except PeerTimeoutError as error:
            outcome = (
                error.operator,
                error.rank,
                error.peer,
                error.wanted,
                bool(y.isnan().all()),
                time.monotonic() - start,
            )
    return outcome


@pytest.mark.parametrize("protocol", ["one_shot", "two_phase"])
def test_a_peer_that_never_calls(ranks, world_size, protocol):
    outcomes = ranks(world_size).run(_absent_peer, protocol, 1)
    for rank, outcome in enumerate(outcomes):
        if rank == 1:
            assert outcome is None
        else:
            *named, seconds = outcome
            assert named == [f"gemv_all_reduce.{protocol}", rank, 1, 2, True]
            assert 1.0 <= seconds < 60
