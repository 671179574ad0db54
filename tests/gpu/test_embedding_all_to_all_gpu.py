"""``embedding_all_to_all`` on GPUs: compiled kernels. Run with ``-m gpu``.

Results are compared with float64, and bit by bit where that is promised.
"""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import EmbeddingAllToAllConfig, PeerTimeoutError
from interlace.optim import SGD, RowWiseAdagrad
from tests.nodes.groups import process_group_of

pytestmark = pytest.mark.gpu

CONFIGS = [
    EmbeddingAllToAllConfig(),
    EmbeddingAllToAllConfig(block_bags=1, stages=8, num_warps=2, max_programs=300),
    EmbeddingAllToAllConfig(
        block_bags=8,
        stages=1,
        push_programs=7,
        push_rows=32,
        block_runs=1,
        update_warps=2,
    ),
    EmbeddingAllToAllConfig(block_bags=2, stages=4, run_lookups=16, block_runs=8),
]


@dataclasses.dataclass(frozen=True)
class Call:
    """Each rank's ``tables`` of ``[rows, width]``; bags of up to ``most`` lookups."""

    tables: int
    width: int
    rows: int = 1000
    batch: int = 200
    most: int = 12
    dtype: torch.dtype = torch.float32
    out: torch.dtype = torch.float32
    mode: str = "sum"
    seed: int = 0

    @property
    def name(self):
        return f"{self.tables} {self.width} {self.dtype} {self.out}"

    def inputs(self):
        generator = torch.Generator("cuda").manual_seed(1000 * self.seed + dist.get_rank())
        weights = [
            torch.randn(self.rows, self.width, generator=generator, device="cuda").to(self.dtype)
            for _ in range(self.tables)
        ]
        lengths = torch.randint(
            0, self.most + 1, (self.tables * self.batch,), generator=generator, device="cuda"
        )
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return (
            weights,
            torch.randint(0, self.rows, (int(offsets[-1]),), generator=generator, device="cuda"),
            offsets,
        )

    def forward(self, weights, indices, offsets, **more):
        return interlace.embedding_all_to_all(
            weights,
            indices,
            offsets,
            mode=self.mode,
            output_dtype=self.out,
            batch_size=self.batch,
            name=self.name,
            **more,
        )

    def mine(self):
        chunk = math.ceil(self.batch / dist.get_world_size())
        first = min(dist.get_rank() * chunk, self.batch)
        return slice(first, min(first + chunk, self.batch))

    def expected(self, weights, indices, offsets):
        """This rank's samples in float64, of tables that every rank pools for itself."""
        bags = torch.nn.functional.embedding_bag
        bounds = offsets[:: self.batch].tolist()
        parts = []
        for table, weight in enumerate(weights):
            ends = offsets[table * self.batch : (table + 1) * self.batch + 1] - bounds[table]
            rows = indices[bounds[table] : bounds[table + 1]]
            parts.append(
                bags(rows, weight.double(), ends, mode=self.mode, include_last_offset=True)
            )
        own = torch.cat(parts, 1)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        return torch.cat(everyone, 1)[self.mine()]

    def bound(self):
        eps = torch.finfo(self.out).eps
        return eps + 4 * self.most * torch.finfo(torch.float32).eps


def relative_error(y, want):
    return float((y.double() - want).norm() / want.norm())


CALLS = [
    Call(3, 256),
    Call(2, 128, dtype=torch.float16, out=torch.float16, batch=201, mode="mean"),
    Call(2, 64, dtype=torch.bfloat16, batch=3),
    Call(1, 20, dtype=torch.float16, batch=77),
    Call(2, 2048, rows=50, most=3),
    Call(5, 7, mode="mean"),
]


def matches(calls, impl, config):
    """On a rank: forward passes with their errors and the bounds of those."""
    found = []
    for call in calls:
        inputs = call.inputs()
        y = call.forward(*inputs, config=config, impl=impl, check_indices=True)
        want = call.expected(*inputs)
        if y.numel():
            found.append((call, relative_error(y, want), call.bound()))
    interlace.synchronize()
    return found


def check_forward(outcomes):
    for rank in outcomes:
        for call, error, limit in rank:
            assert error <= limit, (call, error, limit)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_matches_float64(ranks, world_size, config):
    check_forward(ranks(world_size).run(matches, CALLS, "fused", config))


def trains(calls, impl, config):
    """Dense and sparse gradients and Adagrad against autograd in float64; then everything again,
    bit by bit.
    """
    found, same = [], True
    for call in calls:
        weights, indices, offsets = call.inputs()
        generator = torch.Generator("cuda").manual_seed(5 + dist.get_rank())
        exact = [weight.double().requires_grad_() for weight in weights]
        own = dataclasses.replace(call, out=torch.float64)
        want = own.expected(exact, indices, offsets)
        upstream = torch.randn(want.shape, generator=generator, device="cuda").to(call.out)
        everyone = [
            torch.zeros(call.batch, want.shape[1], device="cuda", dtype=torch.float64)
            for _ in range(dist.get_world_size())
        ]
        padded = torch.zeros_like(everyone[0])
        padded[call.mine()] = upstream.double()
        dist.all_gather(everyone, padded)
        columns = call.tables * call.width
        mine = sum(everyone)[:, dist.get_rank() * columns :][:, :columns]
        bags = torch.nn.functional.embedding_bag
        bounds = offsets[:: call.batch].tolist()
        for table, weight in enumerate(exact):
            ends = offsets[table * call.batch : (table + 1) * call.batch + 1] - bounds[table]
            rows = indices[bounds[table] : bounds[table + 1]]
            pooled = bags(rows, weight, ends, mode=call.mode, include_last_offset=True)
            pooled.backward(mine[:, table * call.width :][:, : call.width])
        results = []
        for kind in ("dense", "sparse", "adagrad", "dense", "sparse", "adagrad"):
            tables = [weight.clone().requires_grad_() for weight in weights]
            states = [torch.zeros(call.rows, device="cuda") for _ in tables]
            gradient = RowWiseAdagrad(0.1, 1e-3, states) if kind == "adagrad" else kind
            call.forward(
                tables, indices, offsets, gradient=gradient, config=config, impl=impl
            ).backward(upstream)
            for table, weight, reference in zip(tables, weights, exact, strict=True):
                if kind == "adagrad":
                    state = (reference.grad**2).mean(1)
                    after = weight.double() - 0.1 / (state.sqrt() + 1e-3)[:, None] * reference.grad
                    found.append((call, kind, relative_error(table, after)))
                    results.append(table.detach())
                else:
                    dense = table.grad.to_dense()
                    found.append((call, kind, relative_error(dense, reference.grad)))
                    results.append(dense)
        half = len(results) // 2
        same &= all(map(torch.equal, results[:half], results[half:]))
    interlace.synchronize()
    return found, same


def check_gradients(outcomes):
    for found, _ in outcomes:
        for call, kind, error in found:
            # NaN where a table has no gradient at all, in exact arithmetic too.
            assert error <= 2 * torch.finfo(call.dtype).eps + 1e-4 or math.isnan(error), (
                call,
                kind,
                error,
            )


# Eight runs of 2048 columns at once would not fit in registers, and take ptxas two minutes.
@pytest.mark.parametrize(
    ("config", "call"),
    [
        pytest.param(config, call, id=f"{config}-{call.name}")
        for config in CONFIGS
        for call in CALLS
        if config.block_runs * call.width <= 8192
    ],
)
def test_gradients_match_float64_and_repeat(ranks, world_size, config, call):
    outcomes = ranks(world_size).run(trains, [call], "fused", config)
    check_gradients(outcomes)
    assert all(same for _, same in outcomes)


def _long_run(steps):
    """Many passes back to back, of changing shapes and numbers, ranks held up at random; every
    result bit by bit.
    """
    cases = []
    for seed in range(3):
        for config, call in zip(CONFIGS, CALLS[:4], strict=True):
            call = dataclasses.replace(call, seed=seed)
            weights, indices, offsets = call.inputs()
            tables = [weight.requires_grad_() for weight in weights]
            y = call.forward(tables, indices, offsets, config=config, impl="fused")
            upstream = torch.randn(y.shape, device="cuda").to(y.dtype)
            gradients = torch.autograd.grad(y, tables, upstream)
            cases.append(
                (
                    call,
                    config,
                    tables,
                    indices,
                    offsets,
                    upstream,
                    y.detach().clone(),
                    [g.clone() for g in gradients],
                )
            )
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    delays = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        call, config, tables, indices, offsets, upstream, first, gradients = cases[
            step % len(cases)
        ]
        if torch.rand((), generator=delays) < 0.1:
            torch.cuda._sleep(int(torch.randint(1000, 300_000, (), generator=delays)))
        y = call.forward(tables, indices, offsets, config=config, impl="fused")
        wrong += (y != first).any()
        if step % 3 == 0:
            for found, want in zip(
                torch.autograd.grad(y, tables, upstream), gradients, strict=True
            ):
                wrong += (found != want).any()
    interlace.synchronize()
    return int(wrong)


def test_two_thousand_passes_with_random_delays(ranks, world_size, turns):
    assert ranks(world_size).run(_long_run, turns(2000)) == [0] * world_size


def _graphs():
    """A forward pass, and a training step with SGD, captured and replayed; outputs of the graph
    stay the graph's.
    """
    call = CALLS[0]
    weights, indices, offsets = call.inputs()
    want = call.expected(weights, indices, offsets)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call.forward(weights, indices, offsets)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = call.forward(weights, indices, offsets)
    errors = []
    for _ in range(3):
        graph.replay()
        errors.append(relative_error(captured, want))
        others = [call.forward(weights, indices, offsets) for _ in range(4)]
        errors += [relative_error(y, want) for y in [captured, *others]]
    tables = [weight.clone().requires_grad_() for weight in weights]
    upstream = torch.ones_like(captured)

    def step():
        call.forward(tables, indices, offsets, gradient=SGD(0.125)).backward(upstream)

    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    stream.synchronize()
    before = [table.detach().clone() for table in tables]
    training = torch.cuda.CUDAGraph()
    with torch.cuda.graph(training, stream=stream):
        step()
    training.replay()
    torch.cuda.synchronize()
    once = [table.detach() - old for table, old in zip(tables, before, strict=True)]
    first = [old - weight for old, weight in zip(before, weights, strict=True)]
    steps = [
        relative_error(2 * change, two.double()) for change, two in zip(once, first, strict=True)
    ]
    interlace.synchronize()
    return max(errors), max(steps), call.bound()


def test_graphs(ranks, world_size):
    for error, step, limit in ranks(world_size).run(_graphs):
        assert error <= limit
        assert step <= 1e-4


def _pooled(nodes):
    """Elements in which other implementations differ from fused, forward and in gradients, eager
    and replayed from a graph.
    """
    wrong = {}
    with process_group_of(nodes) as process_group:
        group = interlace.group_of(process_group)
        for call in CALLS:
            inputs = call.inputs()
            tables = [weight.clone().requires_grad_() for weight in inputs[0]]
            results = {}
            for impl in ("fused", "pooled", "auto"):
                keep = {"impl": impl, "group": process_group}
                y = call.forward(tables, *inputs[1:], **keep)
                gradients = torch.autograd.grad(y, tables, torch.ones_like(y))
                graph = torch.cuda.CUDAGraph()
                with torch.no_grad():
                    call.forward(*inputs, **keep)  # ranks ask one another before the capture
                    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                        captured = call.forward(*inputs, **keep)
                for _ in range(2):
                    captured.zero_()
                    graph.replay()
                    group.synchronize()
                results[impl] = [y.detach().clone(), captured.clone(), *gradients]
                graph.reset()  # NCCL keeps a communicator for as long as a graph has its kernels
            for impl in ("pooled", "auto"):
                wrong[call, impl] = sum(
                    int((one != other).sum())
                    for one, other in zip(results[impl], results["fused"], strict=True)
                )
    return wrong


@pytest.mark.parametrize("nodes", [1, 2])
def test_pooled_and_auto_have_the_bits_of_fused(ranks, world_size, nodes):
    for wrong in ranks(world_size).run(_pooled, nodes):
        assert not any(wrong.values()), wrong


def _absent_peer(backward, absent):
    group = dist.new_group()
    call = CALLS[0]
    weights, indices, offsets = call.inputs()
    tables = [weight.clone().requires_grad_() for weight in weights]
    keep = {"impl": "fused", "group": group, "gradient": SGD(0.1)}
    keep["config"] = EmbeddingAllToAllConfig()
    y = call.forward(tables, indices, offsets, **keep)
    y.backward(torch.ones_like(y))
    y = call.forward(tables, indices, offsets, **keep)
    before = [table.detach().clone() for table in tables]
    interlace.synchronize(group)
    interlace.set_deadline(1.0, group)
    dist.barrier()
    outcome = None
    if dist.get_rank() != absent:
        start = time.monotonic()
        if backward:
            y.backward(torch.ones_like(y))
        else:
            y = call.forward(tables, indices, offsets, **keep)
        try:
            interlace.synchronize(group)
        except PeerTimeoutError as error:
            good = all(map(torch.equal, before, tables)) if backward else bool(y.isnan().all())
            outcome = error.operator, error.rank, error.peer, good, time.monotonic() - start
    return outcome


@pytest.mark.parametrize("backward", [False, True])
def test_a_peer_that_never_calls(ranks, world_size, backward):
    """The kernel ends; its output is NaN, or the tables are as they were."""
    outcomes = ranks(world_size).run(_absent_peer, backward, 1)
    name = "embedding_all_to_all" + (".backward" if backward else "")
    for rank, outcome in enumerate(outcomes):
        if rank == 1:
            assert outcome is None
        else:
            *named, seconds = outcome
            assert named == [name, rank, 1, True]
            assert 1.0 <= seconds < 60
