"""Triggered transfers on GPUs: copies that wait for a kernel's counts. Run with ``-m gpu``."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import interlace
import interlace.language as il
from tests.errors import error_of
from tests.gemm.calls import Call, check_all, check_gradients, compiled, differentiate, run
from tests.pool import pools

pytestmark = pytest.mark.gpu

CASES = [
    ("gemm_all_to_all", "chunked"),
    ("gemm_all_reduce", "chunked"),
]
"""Operators and implementations; the tests of products have gemm_reduce_scatter in parts."""


@triton.jit(do_not_specialize=["value", "first", "rows", "rows_each", "stride"])
def fill(out, counters, value, first, rows, rows_each, stride, COLUMNS: tl.constexpr):
    """Rows of ``value + row``, from ``first`` on; each is a tile."""
    row = (first + tl.program_id(0)) % rows
    columns = tl.arange(0, COLUMNS)
    tl.store(out + row.to(tl.int64) * stride + columns, (value + row + columns * 0).to(tl.int32))
    il.count(counters + row // rows_each)


def _fill(out: interlace.TriggeredTransfers, value: int, rows: int, order: int = 1) -> None:
    rows_each = rows // len(out.counters)
    first = (dist.get_rank() + order) * (rows // dist.get_world_size())
    target = out.begin()
    fill[(rows,)](
        target,
        out.counters,
        value,
        first,
        rows,
        rows_each,
        target.stride(0),
        COLUMNS=target.shape[1],
    )


def _calls(operator: str, world_size: int, impl: str) -> list[Call]:
    """Tiles that fill a rank's rows and that do not; a column too many for tile stores; biases;
    float8.
    """
    shapes = [
        (128, 512, 256, "bfloat16"),
        (96, 513, 257, "float16"),
        (256, 384, 512, "float8"),
        (40, 320, 64, "float32"),
    ]
    calls = [
        Call(operator, rows * world_size, columns, inner, dtype, True, impl=impl, seed=i)
        for i, (rows, columns, inner, dtype) in enumerate(shapes)
    ]
    return [call for call in calls if call.can_run]


@pytest.mark.parametrize(("operator", "impl"), CASES)
def test_products_match_float64(ranks: Any, world_size: int, operator: str, impl: str) -> None:
    calls = _calls(operator, world_size, impl) * 2
    check_all(calls, ranks(world_size).run(run, calls))


@pytest.mark.parametrize(("operator", "impl"), CASES)
def test_gradients_and_one_graph(ranks: Any, world_size: int, operator: str, impl: str) -> None:
    call = _calls(operator, world_size, impl)[0]
    outcomes = ranks(world_size).run(differentiate, call)
    check_gradients(call, outcomes, factor=(call.inner + 128 * world_size) ** 0.5)
    for eager, graph in ranks(world_size).run(_compile, call):
        torch.testing.assert_close(graph, eager)


def _compile(call: Call) -> list[list[torch.Tensor]]:
    return [[tensor.cpu() for tensor in outcome] for outcome in compiled(call)]


def _long_run(epochs: int) -> tuple[int, int]:
    """Wrong epochs, in pieces and several orders of completion; bytes of torch's memory that they
    took.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, columns = 64 * ranks, 1024
    out = interlace.TriggeredTransfers((rows, columns), dtype=torch.int32, tiles=32, pieces=2)
    wrong = torch.zeros([], dtype=torch.int64, device="cuda")
    expected = (
        rank * 64
        + torch.arange(64, device="cuda")[None, :, None]
        + 1000 * torch.arange(ranks, device="cuda")[:, None, None]
    )
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for epoch in range(epochs):
        _fill(out, 1000 * rank + epoch % 17, rows, order=epoch % 3)
        if epoch % 97 == rank:
            torch.cuda._sleep(100_000)
        wrong += (out.exchange() != expected + epoch % 17).any()
    torch.cuda.synchronize()
    return int(wrong), torch.cuda.memory_reserved() - reserved


def test_ten_thousand_epochs(ranks: Any, world_size: int, turns: Any) -> None:
    for wrong, grown in ranks(world_size).run(_long_run, turns(10_000)):
        assert wrong == 0
        assert grown < 16 << 20


def _replay() -> list[bool]:
    """One graph, replayed back to back with ranks of different speed, between eager epochs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, columns = 256 * ranks, 768 * 4
    generator = torch.Generator("cuda").manual_seed(rank)
    x, w = (
        torch.randn(size, 512, generator=generator, device="cuda").bfloat16()
        for size in (rows, columns)
    )
    kept = torch.zeros(8, rows // ranks, columns, dtype=torch.bfloat16, device="cuda")
    step = torch.zeros([], dtype=torch.int64, device="cuda")

    def call() -> torch.Tensor:
        return interlace.gemm_reduce_scatter(x, w, impl="chunked")

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept.index_copy_(0, step[None], call()[None])
        step += 1
    same = []
    for turn in range(3):
        step.zero_()
        for i in range(8):
            x.fill_(float(turn * 8 + i + 1) / 64)
            if (rank + i) % 3 == 0:
                torch.cuda._sleep(200_000)
            graph.replay()
        last = call()
        torch.cuda.synchronize()
        for i in range(8):
            x.fill_(float(turn * 8 + i + 1) / 64)
            same.append(torch.equal(kept[i], call()))
        same.append(torch.equal(last, kept[7]))
    torch.cuda.synchronize()
    return same


def test_graphs(ranks: Any, world_size: int) -> None:
    assert all(all(same) for same in ranks(world_size).run(_replay))


def _one_connection() -> Any:
    """A graph might put a wait before what it is for: refused. Eager calls work."""
    out = interlace.TriggeredTransfers(
        (8 * dist.get_world_size(), 1024), dtype=torch.int32, tiles=8
    )
    for epoch in range(20):
        _fill(out, epoch, 8 * dist.get_world_size())
        out.exchange()
    interlace.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        refused = error_of(_fill, out, 0, 8 * dist.get_world_size())[0]
    _fill(out, 7, 8 * dist.get_world_size())  # as if nothing had been
    out.exchange()
    interlace.synchronize()
    return refused


def test_with_one_connection(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which CUDA reads once
    with pools("cuda") as ranks:
        assert ranks(world_size).run(_one_connection) == ["BackendError"] * world_size


def _miscounted(counted: int) -> Any:
    """Rank 0 counts other than it said. Nothing hangs; peers do not take what came for a result."""
    rank, rows = dist.get_rank(), 8 * dist.get_world_size()
    group = dist.new_group()
    out = interlace.TriggeredTransfers((rows, 1024), dtype=torch.int32, tiles=8, group=group)
    _fill(out, 0, rows)
    out.exchange()
    interlace.synchronize(group)
    interlace.set_deadline(2.0, group)
    dist.barrier()
    _fill(out, 0, rows)
    if rank == 0:
        out.counters[1] += counted - 8
    start = time.monotonic()
    error = error_of(out.exchange) or error_of(interlace.synchronize, group)
    return error[:2], time.monotonic() - start


@pytest.mark.parametrize("counted", [7, 9])
def test_a_kernel_that_miscounts(ranks: Any, world_size: int, counted: int) -> None:
    outcomes = ranks(world_size).run(_miscounted, counted)
    for rank, ((kind, message), seconds) in enumerate(outcomes):
        assert kind == ("PeerTimeoutError" if rank else "MiscountError")
        assert seconds < 60
        if rank == 0:
            assert f"got {counted} for the 8 of piece 1" in message
