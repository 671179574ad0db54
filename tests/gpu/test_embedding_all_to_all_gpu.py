"""``embedding_all_to_all`` on real GPUs: one process a GPU, compiled kernels. Run with ``-m gpu``.

Each test starts its own ranks. Results are compared with float64 sums, and bit by bit where that is promised.
"""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import EmbeddingAllToAllConfig, PeerTimeoutError
from interlace.optim import RowWiseAdagrad
from tests.ops.embedding_all_to_all.calls import DTYPES, Call
from tests.ops.embedding_all_to_all.test_gradients import EPSILON, LEARNING_RATE, bound, exact, upstream

pytestmark = pytest.mark.gpu

CONFIGS = [
    EmbeddingAllToAllConfig("direct", "interleaved", 4, 2, 1, 64),
    EmbeddingAllToAllConfig("direct", "remote_first", 1, 4, 2, 7),
    EmbeddingAllToAllConfig("tiles", "interleaved", 8, 2, 1, 64),
    EmbeddingAllToAllConfig("tiles", "local_first", 4, 1, 4, 32),
    EmbeddingAllToAllConfig("sliced", "interleaved", 4, 2, 1, 64, slice_blocks=3),
    EmbeddingAllToAllConfig("sliced", "remote_first", 2, 2, 1, 16, slice_blocks=1),
]


@pytest.fixture(scope="module")
def world_size():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.fail("these tests need at least two GPUs")
    return min(count, 4)


def run(worker, world_size, *args):
    return interlace.launch(worker, world_size, *args, backend="cuda", timeout_s=110)


def forward(call, tables=None, **more):
    rank = dist.get_rank()
    indices, offsets, scale = call.lookups(rank)
    return interlace.embedding_all_to_all(
        [table.cuda() for table in call.tables(rank)] if tables is None else tables, indices.cuda(), offsets.cuda(),
        per_sample_weights=None if scale is None else scale.cuda(), mode=call.mode,
        output_dtype=None if call.output_dtype is None else DTYPES[call.output_dtype],
        batch_size=call.batch, name=f"{call.widths} {call.dtype} {call.seed}", impl="fused", config=call.config, **more,
    )  # fmt: skip


def layouts(world_size, protocol):
    equal = tuple((64,) * (rank + 1) for rank in range(world_size))
    yield Call(equal, 70, rows=200, most=9)
    yield Call(equal, 5, rows=20, most=3, mode="mean", seed=1)
    if protocol != "tiles":
        mixed = tuple((4 * rank + 3, 256)[: rank % 3] for rank in range(world_size))
        yield Call(mixed, 33, rows=50, most=6, weighted=True, index_dtype=torch.int32, seed=2)


def _matches(dtype):
    results = []
    for config in CONFIGS:
        for call in layouts(dist.get_world_size(), config.protocol):
            results.append(forward(dataclasses.replace(call, dtype=dtype, config=config)).cpu())
    interlace.synchronize()
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(world_size, dtype):
    results = run(_matches, world_size, dtype)
    calls = [call for config in CONFIGS for call in layouts(world_size, config.protocol)]
    for i, call in enumerate(calls):
        dataclasses.replace(call, dtype=dtype).check([results[rank][i] for rank in range(world_size)])


def _train(call, kind, steps):
    rank = dist.get_rank()
    tables = [table.cuda().requires_grad_() for table in call.tables(rank)]
    states = [torch.zeros(table.shape[0], device="cuda") for table in tables]
    gradient = RowWiseAdagrad(LEARNING_RATE, EPSILON, states) if kind == "adagrad" else kind
    for _ in range(steps):
        forward(call, tables, gradient=gradient).backward(upstream(call, rank).cuda())
    interlace.synchronize()
    if kind == "adagrad":
        return [table.detach().cpu() for table in tables], [state.cpu() for state in states]
    return [table.grad.to_dense().cpu() for table in tables], None


@pytest.mark.parametrize("kind", ["dense", "sparse", "adagrad"])
@pytest.mark.parametrize("hot", [False, True])
def test_gradients_match_float64(world_size, kind, hot):
    widths = tuple((64, 12)[: 1 + rank % 2] for rank in range(world_size))
    call = Call(widths, 70, rows=300, most=9, hot=hot, config=EmbeddingAllToAllConfig(push_programs=16, update_programs=64))
    for rank, (found, states) in enumerate(run(_train, world_size, call, kind, 1)):
        for table, (value, magnitude) in enumerate(exact(call, rank)):
            before = call.tables(rank)[table].double()
            limit = bound(call, value, magnitude)
            if kind != "adagrad":
                assert ((found[table].double() - value).abs() <= limit).all()
                continue
            state = (value**2).mean(1)
            after = before - LEARNING_RATE / (state.sqrt() + EPSILON)[:, None] * value
            assert torch.allclose(states[table].double(), state, rtol=1e-4, atol=1e-12)
            assert torch.allclose(found[table].double(), after, rtol=1e-4, atol=1e-5)


def test_updates_are_the_same_bit_by_bit(world_size):
    call = Call(((64,),) * world_size, 500, rows=40, most=20, config=EmbeddingAllToAllConfig(run_lookups=16))
    first, second = run(_train, world_size, call, "adagrad", 5), run(_train, world_size, call, "adagrad", 5)
    for (tables, states), (tables_again, states_again) in zip(first, second, strict=True):
        assert all(map(torch.equal, tables, tables_again))
        assert all(map(torch.equal, states, states_again))


def _long_run(calls):
    """Calls back to back on alternating layouts, some results kept, ranks held up at random; every result compared."""
    rank = dist.get_rank()
    cases = []
    for i, config in enumerate(CONFIGS[:5]):
        call = Call(((64, 64),) * dist.get_world_size(), 256, rows=500, most=7, seed=i, config=config)
        indices, offsets, _ = (None if each is None else each.cuda() for each in call.lookups(rank))
        tables = [table.cuda() for table in call.tables(rank)]
        ready = {"batch_size": call.batch, "name": str(i), "impl": "fused", "config": config}
        first = interlace.embedding_all_to_all(tables, indices, offsets, **ready).clone()
        cases.append((tables, indices, offsets, ready, first))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    delays = torch.Generator().manual_seed(rank)
    kept = []
    for number in range(calls):
        tables, indices, offsets, ready, first = cases[number % len(cases)]
        if torch.rand((), generator=delays) < 0.05:
            torch.cuda._sleep(int(torch.randint(1000, 200_000, (), generator=delays)))
        y = interlace.embedding_all_to_all(tables, indices, offsets, **ready)
        kept.append((y, first))
        if torch.rand((), generator=delays) < 0.5:  # each rank by itself: other buffers, sometimes none left
            wrong += sum((y != first).any() for y, first in kept)
            kept.clear()
    wrong += sum(((y != first).any() for y, first in kept), torch.zeros_like(wrong))
    interlace.synchronize()
    return int(wrong)


def test_five_thousand_calls_with_random_delays(world_size):
    assert run(_long_run, world_size, 5000) == [0] * world_size


def _graph():
    call = Call(((64,),) * dist.get_world_size(), 256, rows=500, most=7, config=CONFIGS[0])
    rank = dist.get_rank()
    indices, offsets, _ = (None if each is None else each.cuda() for each in call.lookups(rank))
    tables = [table.cuda() for table in call.tables(rank)]
    ready = {"batch_size": call.batch, "name": "graph", "impl": "fused", "config": call.config}
    first = interlace.embedding_all_to_all(tables, indices, offsets, **ready).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = interlace.embedding_all_to_all(tables, indices, offsets, **ready)
    same = True
    for _ in range(100):
        captured.zero_()
        graph.replay()
        eager = interlace.embedding_all_to_all(tables, indices, offsets, **ready)
        same &= torch.equal(captured, first) and torch.equal(eager, first)
    return same


def test_graph_replays_among_other_calls(world_size):
    assert run(_graph, world_size) == [True] * world_size


def _absent_peer(absent):
    group = dist.new_group()
    call = Call(((64,),) * dist.get_world_size(), 64, rows=100, config=CONFIGS[0])
    forward(call, group=group)
    interlace.synchronize(group)
    interlace.set_deadline(1.0, group)
    outcome = None
    if dist.get_rank() != absent:
        start = time.monotonic()
        y = forward(call, group=group)
        try:
            interlace.synchronize(group)
        except PeerTimeoutError as error:
            outcome = error.peer, bool(y.isnan().all()), time.monotonic() - start < 5
    time.sleep(2)
    return outcome


def test_a_peer_that_never_calls(world_size):
    expected = [(1, True, True) if rank != 1 else None for rank in range(world_size)]
    assert run(_absent_peer, world_size, 1) == expected
