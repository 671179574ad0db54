"""``mixture_of_experts`` on GPUs: compiled kernels. Run with ``-m gpu``.

Results are compared with float64, and bit by bit where that is promised.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import ExpertActivation, MixtureOfExpertsConfig
from tests.gpu.absent import call_without
from tests.operators.mixture_of_experts.calls import Call, check_all, forward, leaves_of
from tests.operators.mixture_of_experts.float8 import Float8Call, run_all

pytestmark = pytest.mark.gpu

CONFIGS = [
    None,
    MixtureOfExpertsConfig(64, 128, 64, num_warps=4, push_programs=7, push_rows=16),
    # Its block_k does not divide F = 320, so the products load by pointers.
    MixtureOfExpertsConfig(64, 64, 128, num_warps=4, programs=40, sum_programs=50),
]


def _inputs(call):
    return [tensor.to(interlace.group_of().device) for tensor in call.inputs(dist.get_rank())]


def _step(call, tensors):
    leaves = [leaf.requires_grad_() for leaf in leaves_of(tensors)]
    y = forward(call, tensors)
    return [y.detach(), *torch.autograd.grad(y, leaves, tensors[5])]


def matches(calls):
    """On a rank: y and gradients of each call."""
    found = [[each.cpu() for each in _step(call, _inputs(call))] for call in calls]
    interlace.synchronize()
    return found


def _calls(world_size):
    """Sizes that tiles fit and such that they do not; descriptors and pointers; every routing, k
    and dtype.
    """
    # Number of a configuration, dtype, and what is not the default.
    large = [
        (0, "bfloat16", {}),
        (1, "float16", {"routing": "few", "local": 3}),
        (2, "bfloat16", {"routing": "holes", "local": 7, "top_k": 6}),
        (0, "bfloat16", {"routing": "one", "top_k": 1}),
        (1, "bfloat16", {"routing": "one", "factor": 0.5}),
        (2, "float32", {}),
        (0, "bfloat16", {"halves": True}),
    ]
    sizes = {"tokens": 333, "hidden": 256, "ffn": 320}
    return [
        Call(world_size, **sizes, **more, dtype=dtype, config=CONFIGS[number], seed=seed)
        for seed, (number, dtype, more) in enumerate(large, 1)
    ] + [
        Call(world_size, 50, 2, 2, 100, 60, "float32", config=None, seed=7),
        Call(world_size, 5, 1, 1, 7, 3, "bfloat16", config=None, seed=8),
        Call(world_size, 1000, 8, 16, 64, 64, "bfloat16", config=CONFIGS[0], seed=9),
        Call(world_size, 50, 2, 2, 100, 60, "float32", config=None, seed=11, halves=True),
    ]


GPT_OSS = ExpertActivation("silu", alpha=1.702, limit=7.0, up_offset=1.0)


def _forms(world_size):
    """Biases, activations, orders of weights in memory, no gate; descriptors and pointers. First
    gpt-oss's layer with its own sizes, which tiles do not divide, and few experts.
    """
    of_gpt_oss = {"along_k": False, "biases": True, "activation": GPT_OSS}
    # Rounded numbers may pass the limit, where the derivative jumps, so that is for float32.
    smooth = of_gpt_oss | {"activation": ExpertActivation(alpha=1.702, up_offset=1.0)}
    forms = [
        (0, "bfloat16", smooth | {"hidden": 2880, "ffn": 2880, "local": 4, "top_k": 4}),
        (0, "bfloat16", smooth | {"halves": True, "local": 3}),
        (1, "float16", {"halves": True, "biases": True, "factor": 0.5}),
        (0, "bfloat16", {"biases": True, "activation": ExpertActivation("gelu_tanh")}),
        (0, "bfloat16", {"gates": 1, "activation": ExpertActivation("relu2"), "biases": True}),
        (2, "bfloat16", {"gates": 1, "activation": ExpertActivation("gelu"), "along_k": False}),
        (2, "float32", of_gpt_oss | {"halves": True}),
        (2, "float32", of_gpt_oss | {"hidden": 100, "ffn": 60, "routing": "holes"}),
        (0, "bfloat16", {"activation": ExpertActivation("relu"), "routing": "few"}),
    ]
    base = Call(world_size, tokens=333, hidden=256, ffn=320)
    return [
        dataclasses.replace(base, dtype=dtype, config=CONFIGS[number], seed=seed, **more)
        for seed, (number, dtype, more) in enumerate(forms, 40)
    ]


@pytest.mark.parametrize("number", range(len(_forms(2))))
def test_forms_match_float64(ranks, world_size, number):
    """Forward and backward, gradients of biases too."""
    for size in (1, world_size):
        calls = [_forms(size)[number]]
        check_all(calls, ranks(size).run(matches, calls))


@pytest.mark.parametrize("number", range(len(_calls(2))))
def test_matches_float64(ranks, world_size, number):
    for size in (1, world_size):
        calls = [_calls(size)[number]]
        check_all(calls, ranks(size).run(matches, calls))


def _decoding_calls(world_size):
    """Tiles of 16, 32, 64 and 128 tokens; sizes that divide and others; every routing and dtype."""
    base = Call(world_size, impl="decode", config=None, hidden=256, ffn=320, local=4)
    of_gpt_oss = {"along_k": False, "biases": True, "activation": GPT_OSS}
    tall = MixtureOfExpertsConfig(block_m=128, block_n=128, block_k=64, num_stages=3)
    tail = dataclasses.replace(tall, block_m=64, tail=32)
    taller = MixtureOfExpertsConfig(block_m=128, block_n=256, block_k=64, num_stages=4, tail=32)
    changes = [
        {"tokens": 1, "dtype": "bfloat16"},
        {"tokens": 16, "dtype": "bfloat16", "hidden": 2048, "ffn": 768, "local": 16, "top_k": 8},
        {"tokens": 64, "dtype": "float16", "routing": "few", "halves": True},
        {"tokens": 256, "dtype": "bfloat16", "routing": "one"},
        {"tokens": 300, "dtype": "bfloat16", "config": tall},
        *(
            {"tokens": n, "dtype": "bfloat16", "config": c}
            for c in (tail, taller)
            for n in (70, 150, 300)
        ),
        {"tokens": 33, "dtype": "bfloat16", "routing": "holes", "hidden": 100, "ffn": 60},
        {"tokens": 7, "hidden": 7, "ffn": 3, "halves": True},
        {"tokens": 16, "dtype": "bfloat16", "hidden": 2880, "ffn": 2880, "top_k": 4} | of_gpt_oss,
        {"tokens": 256, "dtype": "bfloat16", "hidden": 2880, "ffn": 2880, "top_k": 4} | of_gpt_oss,
        {"tokens": 33, "dtype": "bfloat16", "halves": True} | of_gpt_oss,
        {"tokens": 33, "hidden": 100, "ffn": 60} | of_gpt_oss,
        {"tokens": 9, "dtype": "float16", "gates": 1, "activation": ExpertActivation("relu2")},
    ]
    return [dataclasses.replace(base, seed=20 + i, **more) for i, more in enumerate(changes)]


def _decode(calls):
    found = []
    for call in calls:
        tensors = _inputs(call)
        with torch.no_grad():
            # A race shows itself in many calls.
            found.append([forward(call, tensors) for _ in range(20)])
    interlace.synchronize()
    for ys in found:
        for y in ys[1:]:
            torch.testing.assert_close(y, ys[0], rtol=0, atol=0)
    return [[ys[0].cpu()] for ys in found]


@pytest.mark.parametrize("part", range(4))  # each compiles for half a minute
def test_decoding_matches_float64(ranks, world_size, part):
    """The same bits in every one of 20 calls, too."""
    for size in (1, world_size):
        calls = _decoding_calls(size)[part::4]
        check_all(calls, ranks(size).run(_decode, calls))


def _long_run(calls, turns):
    """Layers forward and then backward, many times over, ranks held up at random; every result
    compared bit by bit.
    """
    layers = [(call, _inputs(call)) for call in calls]
    expected = [_step(call, tensors) for call, tensors in layers]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(turns):
        if torch.rand((), generator=generator) < 0.2:
            torch.cuda._sleep(int(torch.randint(0, 3_000_000, (), generator=generator)))
        ys = [forward(call, tensors) for call, tensors in layers]
        for y, (_, tensors), wanted in reversed(list(zip(ys, layers, expected, strict=True))):
            grads = torch.autograd.grad(y, [tensors[i] for i in (0, 2, 3, 4)], tensors[5])
            for mine, theirs in zip([y.detach(), *grads], wanted, strict=True):
                wrong += (mine != theirs).sum()
    interlace.synchronize()
    return int(wrong)


def test_many_calls_with_late_ranks(ranks, world_size, turns):
    """More layers than the group has buffers, of different sizes."""
    calls = [
        Call(world_size, 512, 2, 2, 256, 512, "bfloat16", config=None, seed=1),
        Call(world_size, 300, 6, 8, 128, 192, "bfloat16", config=CONFIGS[1], seed=2),
        Call(world_size, 100, 1, 1, 64, 64, "float32", config=CONFIGS[2], seed=3, routing="one"),
    ]
    assert ranks(world_size).run(_long_run, calls, turns(200)) == [0] * world_size


def _graph(call):
    """A captured forward pass, replayed on its tokens and on others that go elsewhere, between
    ordinary calls.
    """
    tensors, other = _inputs(call), [tensor.cuda() for tensor in call.inputs(dist.get_rank() + 50)]
    with torch.no_grad():
        forward(call, tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = forward(call, tensors)
        expected = [forward(call, [*each[:3], *tensors[3:]]) for each in (tensors, other)]
        found = []
        for each in (tensors, other):
            for place, value in zip(
                tensors[:3], [value.clone() for value in each[:3]], strict=True
            ):
                place.copy_(value)
            graph.replay()
            found.append(y.clone())
            forward(call, tensors)
    interlace.synchronize()
    return bool(torch.equal(found[0], expected[0])), bool(torch.equal(found[1], expected[1]))


@pytest.mark.parametrize("impl", ["fused", "decode"])
def test_graph_capture_and_replay(ranks, world_size, impl):
    call = Call(world_size, 400, 2, 2, 256, 320, "bfloat16", config=None, impl=impl)
    assert ranks(world_size).run(_graph, call) == [(True, True)] * world_size


def _absent_peer(call):
    tensors = _inputs(call)
    return call_without(1, lambda group: forward(call, tensors, group))


@pytest.mark.parametrize("impl", ["fused", "decode"])
def test_a_peer_that_never_calls(ranks, impl):
    """The output is NaN, the error names the peer, and the GPU is free again."""
    call = Call(2, 100, 2, 2, 64, 64, "bfloat16", config=None, impl=impl)
    outcome = ranks(2).run(_absent_peer, call)[0]
    assert outcome == ("PeerTimeoutError", 1, 1.0, True)


def _float8_calls(world_size):
    """Every implementation; tiles that rows fill and that they do not; many blocks of slots."""
    base = Float8Call(world_size, tokens=333, local=4, hidden=512, ffn=384)
    changes = [
        {},
        {"impl": "decode", "tokens": 9},
        {"impl": "unfused", "tokens": 61},
        {"routing": "few", "dtype": torch.float16},
        {"routing": "holes", "hidden": 128, "ffn": 128, "tokens": 1500, "top_k": 3},
        {"routing": "zeros", "impl": "decode", "tokens": 40},
        {"impl": "auto", "tokens": 1},
        {"config": MixtureOfExpertsConfig(
            128, 128, 128, num_warps=8, num_stages=4, push_programs=7, push_rows=16
        )},
    ]  # fmt: skip
    return [dataclasses.replace(base, seed=i, **change) for i, change in enumerate(changes)]


def test_float8_weights_match_float64(ranks, world_size):
    for size in (1, world_size):
        calls = _float8_calls(size)
        results = ranks(size).run(run_all, calls)
        for i, call in enumerate(calls):
            call.check([mine[i] for mine in results])
