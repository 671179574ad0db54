"""``gemv_all_reduce`` on GPUs: up to four of them, through ``interlace.launch``."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import GemvAllReduceConfig

pytestmark = pytest.mark.gpu

WORLD_SIZE = min(4, max(2, torch.cuda.device_count()))  # fewer than two: launch says what is missing

ONE_TOKEN = [
    GemvAllReduceConfig("one_shot", 4, 512, 4),
    GemvAllReduceConfig("one_shot", 8, 256, 2, max_programs=24),
    GemvAllReduceConfig("two_phase", 16, 64, 4, 2),
]
MANY_TOKENS = [
    GemvAllReduceConfig("one_shot", 16, 64, 4, 2, max_programs=7),
    GemvAllReduceConfig("one_shot", 32, 64, 4, 3),
    GemvAllReduceConfig("two_phase", 32, 64, 4, 3, max_programs=24),
]
SHAPES = [(1, 4096, 2048), (1, 101, 777), (1, 3, 1), (2, 130, 96), (17, 512, 500), (70, 96, 130), (256, 1024, 512)]


def launch(worker, *args):
    return interlace.launch(worker, WORLD_SIZE, *args, backend="cuda", timeout_s=110)


def _inputs(tokens, rows, columns, dtype, seed=0, group=None):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + dist.get_rank(group))
    x = torch.randn(tokens, columns, generator=generator, device="cuda").to(dtype)
    w = torch.randn(rows, columns, generator=generator, device="cuda").to(dtype)
    bias = torch.randn(rows, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)
    return x, w, bias


def _excess(y, x, w, bias, group=None):
    """The largest error by element, in units of what float32 sums and one rounding of the output allow."""
    exact = x.double() @ w.double().T
    magnitude = x.double().abs() @ w.double().abs().T
    dist.all_reduce(exact, group=group)
    dist.all_reduce(magnitude, group=group)
    exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    u = torch.finfo(torch.float32).eps / 2
    # Errors of independent roundings add like a random walk: six times its deviation, not the sum of all steps.
    accumulated = 6 * u * math.sqrt(x.shape[1] * dist.get_world_size(group) + 2) * magnitude
    out = torch.finfo(y.dtype)
    bound = accumulated + out.eps / 2 * (exact.abs() + accumulated) + out.smallest_normal * out.eps
    return ((y.double() - exact).abs() / bound).nan_to_num(nan=math.inf).max().item()


def _same_everywhere(y, group=None):
    """Whether all ranks have the same bits."""
    others = [torch.empty_like(y) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, y.contiguous(), group=group)
    return all(torch.equal(y, other) for other in others)


def _matrix():
    wrong = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for seed, (tokens, rows, columns) in enumerate(SHAPES):
            x, w, bias = _inputs(tokens, rows, columns, dtype, seed)
            for config in (None, *(ONE_TOKEN if tokens == 1 else MANY_TOKENS)):
                y = interlace.gemv_all_reduce(x, w, bias, impl="fused", config=config)
                excess, same = _excess(y, x, w, bias), _same_everywhere(y)
                if not (excess <= 1 and same):
                    wrong.append((str(dtype), tokens, rows, columns, str(config), excess, same))
    interlace.synchronize()
    return wrong


def test_matches_float64():
    """Every dtype, shape and kind of configuration; the same bits on every rank."""
    assert launch(_matrix) == [[]] * WORLD_SIZE


def _zero_sizes():
    shapes = []
    for tokens, rows, columns in ((0, 8, 16), (2, 0, 16), (2, 8, 0)):
        x, w, bias = _inputs(tokens, rows, columns, torch.bfloat16)
        y = interlace.gemv_all_reduce(x, w, bias, impl="fused")
        shapes.append((tuple(y.shape), torch.equal(y, bias.expand_as(y))))
    return shapes


def test_empty_inputs():
    assert launch(_zero_sizes) == [[((0, 8), True), ((2, 0), True), ((2, 8), True)]] * WORLD_SIZE


def _graphs():
    """Replays between eager calls, of two graphs with other grids: epochs live in device memory and must stay in step."""
    failures = []
    for config in (*ONE_TOKEN, None):
        x, w, bias = _inputs(1, 2048, 1024, torch.bfloat16)
        small = _inputs(1, 96, 256, torch.bfloat16, seed=1)
        expected = interlace.gemv_all_reduce(x, w, bias, impl="fused", config=config)
        expected_small = interlace.gemv_all_reduce(*small, impl="fused", config=config)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            a = interlace.gemv_all_reduce(x, w, bias, impl="fused", config=config)
        with torch.cuda.graph(second):
            b = interlace.gemv_all_reduce(*small, impl="fused", config=config)
            c = interlace.gemv_all_reduce(x, w, bias, impl="fused", config=config)
        for turn in range(30):
            for out in (a, b, c):
                out.fill_(math.nan)
            first.replay()
            second.replay()
            eager = interlace.gemv_all_reduce(x, w, bias, impl="fused", config=config)
            if not (all(torch.equal(out, expected) for out in (a, c, eager)) and torch.equal(b, expected_small)):
                failures.append((str(config), turn))
    interlace.synchronize()
    return failures


def test_cuda_graphs_between_eager_calls():
    assert launch(_graphs) == [[]] * WORLD_SIZE


def _streams():
    x, w, bias = _inputs(1, 2048, 1024, torch.bfloat16)
    expected = interlace.gemv_all_reduce(x, w, bias, impl="fused")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for call in range(60):
        with torch.cuda.stream(streams[call % 3]):
            torch.cuda._sleep(1000 * ((call + dist.get_rank()) % 5))
            results.append(interlace.gemv_all_reduce(x, w, bias, impl="fused"))
    interlace.synchronize()
    return [call for call, y in enumerate(results) if not torch.equal(y, expected)]


def test_calls_on_several_streams_are_put_in_order():
    assert launch(_streams) == [[]] * WORLD_SIZE


def _subset():
    """Ranks 0 and 1 as a group beside the world: its own memory, epochs and ranks."""
    pair = dist.new_group([0, 1])
    failures = []
    for turn in range(20):
        x, w, bias = _inputs(2, 300, 257, torch.bfloat16, seed=turn)
        y = interlace.gemv_all_reduce(x, w, bias, impl="fused", config=MANY_TOKENS[turn % 3])
        if not _excess(y, x, w, bias) <= 1:
            failures.append(("world", turn))
        if dist.get_rank() < 2:
            y = interlace.gemv_all_reduce(x, w, bias, group=pair, impl="fused", config=MANY_TOKENS[turn % 3])
            if not (_excess(y, x, w, bias, pair) <= 1 and _same_everywhere(y, pair)):
                failures.append(("pair", turn))
    return failures


def test_a_subset_group_beside_the_world():
    assert launch(_subset) == [[]] * WORLD_SIZE


def _back_to_back(count, config, tokens):
    """``count`` calls, each rank sleeping a random time before some of them; how many differ from the first in any bit."""
    x, w, bias = _inputs(tokens, 1024, 512, torch.bfloat16)
    expected = interlace.gemv_all_reduce(x, w, bias, impl="fused", config=config)
    excess = _excess(expected, x, w, bias)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    delays = torch.randint(0, 60_000, (count,), generator=torch.Generator().manual_seed(dist.get_rank())).tolist()
    for cycles in delays:
        if cycles % 4 == 0:
            torch.cuda._sleep(cycles)
        wrong += (interlace.gemv_all_reduce(x, w, bias, impl="fused", config=config) != expected).any()
    interlace.synchronize()
    return excess <= 1, wrong.item()


@pytest.mark.parametrize(
    ("config", "tokens"),
    [(ONE_TOKEN[0], 1), (ONE_TOKEN[1], 1), (MANY_TOKENS[2], 16)],
    ids=["one_shot", "few_programs", "two_phase"],
)
def test_10_000_calls_back_to_back_with_random_delays(config, tokens):
    """A half that is written before its reader is done, or a word taken for another call's, shows here."""
    assert launch(_back_to_back, 10_000, config, tokens) == [(True, 0)] * WORLD_SIZE


def _absent(config):
    """The last rank but one does not call; the others' errors, and what their kernels left in the output."""
    absent = WORLD_SIZE - 2
    group = dist.new_group()
    x, w, bias = _inputs(1, 512, 512, torch.bfloat16)
    interlace.gemv_all_reduce(x, w, bias, group=group, impl="fused", config=config)
    interlace.synchronize(group)
    interlace.set_deadline(1.0, group)
    if dist.get_rank() == absent:
        dist.barrier()
        return None
    start = time.monotonic()
    y = interlace.gemv_all_reduce(x, w, bias, group=group, impl="fused", config=config)
    errors = []
    for check in (
        lambda: interlace.synchronize(group),
        lambda: interlace.gemv_all_reduce(x, w, bias, group=group, impl="fused", config=config),
    ):
        try:
            check()
        except interlace.PeerTimeoutError as error:
            errors.append((error.operator, error.rank, error.peer, error.wanted, error.deadline_s))
    seconds = time.monotonic() - start
    nan = bool(y.isnan().all().item())
    dist.barrier()
    return errors, nan, interlace.group_of(group).broken, seconds


@pytest.mark.parametrize("config", [ONE_TOKEN[0], ONE_TOKEN[2]], ids=["one_shot", "two_phase"])
def test_a_peer_that_never_calls(config):
    """The kernels end after the deadline, the output is NaN, and every waiting rank names the absent one."""
    absent = WORLD_SIZE - 2
    for rank, outcome in enumerate(launch(_absent, config)):
        if rank == absent:
            assert outcome is None
            continue
        errors, nan, broken, seconds = outcome
        assert errors == [(f"gemv_all_reduce.{config.protocol}", rank, absent, 2, 1.0)] * 2
        assert nan
        assert broken
        assert 1.0 <= seconds < 5.0


def _release():
    """Memory of the group by turns: held, released, held again; and free memory of the GPU after each release."""
    free, right = [], []
    for turn in range(4):
        x, w, bias = _inputs(16, 8192, 256, torch.bfloat16, seed=turn)
        y = interlace.gemv_all_reduce(x, w, bias, impl="fused", config=MANY_TOKENS[turn % 3])
        right.append(_excess(y, x, w, bias) <= 1)
        group = interlace.group_of()
        held = sum(group.workspace_bytes().values())
        group.release()
        assert held > 0
        assert sum(group.workspace_bytes().values()) == 0
        del x, w, bias, y
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    return right, max(free[1:]) - min(free[1:])


def test_released_memory_is_freed_and_can_be_had_again():
    for right, drift in launch(_release):
        assert right == [True] * 4
        assert drift < 2**24


def _put():
    """A put is an assignment, and a get a clone, between GPUs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sym = interlace.empty_symmetric((3, 5), dtype=torch.float32)
    sym.peers[(rank + 1) % world_size].fill_(float(rank))
    torch.cuda.synchronize()
    dist.barrier()
    gets = [sym.peers[peer].clone()[0, 0].item() for peer in range(world_size)]
    torch.cuda.synchronize()
    dist.barrier()
    return gets, sym.local.unique().tolist(), tuple(sym.peers.shape)


def test_a_put_is_an_assignment():
    for rank, (gets, local, shape) in enumerate(launch(_put)):
        assert gets == [float((peer - 1) % WORLD_SIZE) for peer in range(WORLD_SIZE)]
        assert local == [float((rank - 1) % WORLD_SIZE)]
        assert shape == (WORLD_SIZE, 3, 5)
