"""What ``mixture_of_experts`` returns, forward and backward, against float64; and what it sends,
against ``costs``.
"""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import interlace
from interlace import ExpertActivation
from interlace.costs import mixture_of_experts as costs
from interlace.operators.mixture_of_experts import decode, layout
from interlace.operators.mixture_of_experts.layout import capacity_of
from tests.operators.mixture_of_experts.calls import (
    DTYPES,
    SMALL,
    Call,
    check_all,
    forward,
    leaves_of,
    run,
    run_one,
)


def _example(impl):
    """Experts 0 and 1, one on each rank: expert e makes 10 (e + 1) silu(1) of 1. Rank 0's token has
    both, rank 1's one only. Of the three slots, more than experts, at least one is empty.
    """
    rank = dist.get_rank()
    x = torch.ones(1, 1)
    experts, weights = (
        torch.tensor([[1, -1, 0]] if rank == 0 else [[0, -1, 2]]),
        torch.tensor([[0.75, 8.0, 0.25]]),
    )
    w_in, w_out = torch.tensor([1.0, rank + 1.0]).view(1, 1, 2, 1), torch.tensor([[[10.0]]])
    return interlace.mixture_of_experts(x, experts, weights, w_in, w_out, impl=impl)


@pytest.mark.parametrize("impl", ["unfused", "fused", "decode"])
def test_worked_example(ranks, impl):
    silu = 0.7310586
    first, second = ranks(2).run(_example, impl)
    assert first.item() == pytest.approx(0.75 * 20 * silu + 0.25 * 10 * silu)
    assert second.item() == pytest.approx(0.75 * 10 * silu)


def _calls(world_size):
    """Each dtype, k, kind of routing and size that no tile divides, with and without capacity; on
    other than two ranks, some.
    """
    base = Call(world_size)
    changes = [
        {"top_k": 2, "routing": "few", "dtype": "bfloat16", "hidden": 33, "ffn": 70},
        {"impl": "unfused", "factor": 0.75, "routing": "holes"},
        {"top_k": 1, "routing": "one"},
        {"top_k": 2, "routing": "one", "factor": 1.25, "tokens": 17},
        {"top_k": 10, "local": 6, "dtype": "float16", "hidden": 8, "ffn": 40, "tokens": 3},
        {"routing": "holes", "local": 3, "factor": 0.5, "hidden": 1, "ffn": 1, "config": None},
        {"tokens": 0},
        {"halves": True, "local": 3, "hidden": 33, "ffn": 70},
        {"halves": True, "dtype": "bfloat16", "factor": 0.75, "tokens": 40},
        {"halves": True, "impl": "unfused"},
    ]
    changes = {1: changes[:2], 2: changes, 4: changes[:3]}[world_size]
    return [dataclasses.replace(base, seed=i, **change) for i, change in enumerate(changes)]


GPT_OSS = ExpertActivation("silu", alpha=1.702, limit=1.0, up_offset=1.0)


def _form_calls(world_size):
    """Biases, activations, experts without a gate and orders of the weights in memory; the layout
    of gpt-oss first.
    """
    base = Call(world_size, impl="fused", local=3)
    of_gpt_oss = {"along_k": False, "biases": True, "activation": GPT_OSS}
    changes = [
        of_gpt_oss | {"hidden": 33, "ffn": 70, "factor": 0.75, "tokens": 17},
        # Rounded numbers may pass the limit, where the derivative jumps.
        of_gpt_oss
        | {"halves": True, "dtype": "bfloat16", "activation": ExpertActivation(alpha=1.702)},
        of_gpt_oss | {"impl": "unfused"},
        {"biases": True, "halves": True, "activation": ExpertActivation("gelu_tanh")},
        {"gates": 1, "activation": ExpertActivation("relu2"), "biases": True, "ffn": 70},
        {"gates": 1, "activation": ExpertActivation("gelu"), "along_k": False},
        {"biases": True, "activation": ExpertActivation("relu"), "routing": "few"},
    ]
    changes = {1: changes[:1], 2: changes, 4: [of_gpt_oss]}[world_size]
    return [dataclasses.replace(base, seed=i, **change) for i, change in enumerate(changes, 30)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_forms_match_float64(ranks, world_size):
    """Forward and backward, gradients of biases too."""
    calls = _form_calls(world_size)
    check_all(calls, ranks(world_size).run(run, calls))


def test_forms_in_decoding_match_float64(ranks):
    changes = [{"impl": "decode"}, {"impl": "unfused", "ffn": 24, "hidden": 24}]
    calls = [
        dataclasses.replace(call, factor=None, **change)
        for call in _form_calls(2)
        if call.impl == "fused"
        for change in changes
    ]
    calls.append(dataclasses.replace(calls[0], hidden=64, ffn=64, dtype="bfloat16", config=None))
    check_all(calls, ranks(2).run(_decode, calls))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_matches_float64(ranks, world_size):
    """Forward and backward; the unfused one too, against the same."""
    calls = _calls(world_size)
    check_all(calls, ranks(world_size).run(run, calls))


def test_many_blocks_of_slots(ranks):
    """More than every program of the plan adds up by itself; an odd number, and a power of two."""
    config = dataclasses.replace(SMALL, block_m=128, push_rows=128)
    base = Call(2, top_k=4, hidden=16, ffn=16, config=config, routing="holes")
    calls = [
        dataclasses.replace(base, tokens=tokens, local=local, factor=factor, seed=tokens)
        for tokens, local, factor in ((673, 2, None), (1024, 3, 0.6))
    ]
    assert [-(-call.tokens * call.top_k // 128) for call in calls] == [22, 32]
    assert layout.FEW_BLOCKS < 22
    check_all(calls, ranks(2).run(run, calls))


def _decoding_calls(world_size):
    """As in training: each dtype, kind of routing and size that no tile divides; one token; tiles
    that have a tail.
    """
    base = Call(world_size, impl="decode")
    tail = dataclasses.replace(SMALL, tail=16)
    changes = [
        {"top_k": 2, "routing": "few", "dtype": "bfloat16", "hidden": 33, "ffn": 70},
        {"top_k": 1, "routing": "one", "tokens": 40},
        {"routing": "holes", "local": 3, "hidden": 1, "ffn": 1, "config": None},
        {"top_k": 10, "local": 6, "dtype": "float16", "hidden": 8, "ffn": 40, "tokens": 3},
        {"halves": True, "local": 3, "hidden": 33, "ffn": 70},
        {"halves": True, "dtype": "bfloat16", "hidden": 64, "ffn": 64, "config": None},
        {"tokens": 1, "hidden": 128, "ffn": 64, "dtype": "bfloat16", "config": None},
        # Experts have up to 16 rows, up to 32 and more.
        {"tokens": 40, "local": 3, "hidden": 33, "ffn": 70, "config": tail},
        {"tokens": 24, "routing": "one", "hidden": 64, "ffn": 64, "config": tail, "halves": True},
        {"tokens": 0},
        {"impl": "unfused", "ffn": 24},
        {"impl": "unfused", "ffn": 24, "halves": True, "routing": "holes", "dtype": "bfloat16"},
    ]
    changes = {1: changes[:2], 2: changes, 3: changes[1:3], 4: changes[:2]}[world_size]
    return [dataclasses.replace(base, seed=i, **change) for i, change in enumerate(changes)]


def _decode(calls):
    return [run_one(call, backward=False) for call in calls]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_decoding_matches_float64(ranks, world_size):
    calls = _decoding_calls(world_size)
    check_all(calls, ranks(world_size).run(_decode, calls))


def _weights_apart():
    """Whether weights whose rows are no multiple of 16 bytes give the same bits as others."""
    x, experts, weights, w_in, w_out, _ = Call(2, hidden=24, ffn=24).inputs(dist.get_rank())
    apart = [torch.cat([weight, weight[..., :1]], -1)[..., :-1] for weight in (w_in, w_out)]
    y, z = (
        interlace.mixture_of_experts(x, experts, weights, *both, impl="unfused")
        for both in (apart, (w_in, w_out))
    )
    return torch.equal(y, z)


def test_stock_experts_take_weights_of_any_strides(ranks):
    assert ranks(2).run(_weights_apart) == [True, True]


def _stock_ways(calls):
    """Whether each call multiplies by grouped products, and its results."""
    outcomes = []
    for call, backward in calls:
        with mock.patch.object(torch, "_grouped_mm", wraps=torch._grouped_mm) as product:
            results = run_one(call, backward=backward)
        outcomes.append((product.called, results))
    return outcomes


def test_what_grouped_products_do_not_take_runs_one_expert_after_another(ranks):
    """Calls with gradients, a capacity that drops, and widths that are not aligned."""
    base = Call(2, ffn=24, impl="unfused")
    by_groups = [(base, False), (dataclasses.replace(base, impl="nccl"), False)]
    changes = [{"factor": 0.5}, {"ffn": 23}, {"tokens": 0}]
    others = [(dataclasses.replace(base, **change), False) for change in changes]
    calls = [*by_groups, (base, True), *others]
    for_rank = ranks(2).run(_stock_ways, calls)
    results = [[found for _, found in outcomes] for outcomes in for_rank]
    check_all([call for call, _ in calls], results)
    for outcomes, found in zip(for_rank, results, strict=True):
        assert [is_grouped for is_grouped, _ in outcomes] == [True, True, *[False] * 4]
        assert torch.equal(found[0][0], found[1][0])
        torch.testing.assert_close(found[0][0], found[2][0])


def _dropped_slots(impl, ffn):
    """Whether nothing changes if slots that name no expert have NaN as their weights, or 2^32 as
    their number, whose lower half is the number of an expert.
    """
    call = Call(2, hidden=24, ffn=ffn, routing="holes", impl=impl)
    x, experts, weights, w_in, w_out, _ = call.inputs(dist.get_rank())
    is_hole = experts < 0
    y, of_nan, of_64_bits = (
        interlace.mixture_of_experts(x, *routing, w_in, w_out, impl=impl)
        for routing in (
            (experts, weights),
            (experts, torch.where(is_hole, float("nan"), weights)),
            (torch.where(is_hole, 2**32, experts), weights),
        )
    )
    return is_hole.any().item(), torch.equal(of_nan, y), torch.equal(of_64_bits, y)


@pytest.mark.parametrize(
    ("impl", "ffn"),
    # Grouped products do not take the last width.
    [("fused", 24), ("decode", 24), ("unfused", 24), ("unfused", 23)],
)
def test_what_dropped_slots_hold_does_not_matter(ranks, impl, ffn):
    assert ranks(2).run(_dropped_slots, impl, ffn) == [(True, True, True)] * 2


def _clamped_infinity(impl, kind):
    """A gate of minus infinity, times an up that is clamped to 1."""
    w_in = torch.tensor([-1.0, 1.0]).view(1, 1, 2, 1)
    return interlace.mixture_of_experts(
        torch.full((1, 1), torch.inf), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1),
        w_in, torch.ones(1, 1, 1), activation=ExpertActivation(kind, limit=1.0), impl=impl,
    )  # fmt: skip


@pytest.mark.parametrize("impl", ["unfused", "fused", "decode"])
@pytest.mark.parametrize("kind", ["relu", "relu2"])
def test_relu_of_minus_infinity_is_zero(ranks, impl, kind):
    """As in torch, and not NaN."""
    assert [y.item() for y in ranks(2).run(_clamped_infinity, impl, kind)] == [0.0, 0.0]


def _with_tiles(call):
    """The interpreter can do them too; but it does not count what they send."""
    from interlace.operators.mixture_of_experts import fused_launches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_launches.Steps, "_fits_descriptors", lambda steps: True)
        return run([call])


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"halves": True, "biases": True},
        {"along_k": False, "biases": True, "activation": GPT_OSS},
        {"along_k": False, "biases": True, "halves": True},
        {"gates": 1, "biases": True},
    ],
)
def test_tiles_of_descriptors(ranks, form):
    """Tiles that hold rows of two sources, or run past an expert's last row: strangers land in rows
    to spare.
    """
    call = Call(
        2,
        tokens=20,
        hidden=32,
        ffn=64,
        config=dataclasses.replace(SMALL, block_n=32, block_k=32),
        seed=1,
        **form,
    )
    check_all([call], ranks(2).run(_with_tiles, call))


def test_reference_and_kernels_drop_the_same_slots():
    assert [capacity_of(100, 2, 8, factor) for factor in (None, 1.0, 1.25, 0.01, 9.0)] == [
        100,
        25,
        32,
        1,
        100,
    ]


def _traffic(call):
    traffic = interlace.group_of().traffic
    tensors = call.inputs(dist.get_rank())
    leaves = [leaf.requires_grad_() for leaf in leaves_of(tensors)]
    found = []

    def measured(step):
        traffic.reset()
        result = step()
        found.append((traffic.message_bytes, traffic.messages, traffic.signals))
        return result

    y = measured(lambda: forward(call, tensors))
    grads = measured(lambda: torch.autograd.grad(y, leaves, tensors[5]))
    return found, [y.detach(), *grads]


@settings(max_examples=4)
@given(
    tokens=st.integers(1, 20), top_k=st.integers(1, 4), local=st.integers(2, 3),
    hidden=st.integers(1, 70), ffn=st.integers(1, 40), factor=st.sampled_from([None, 0.6]),
    routing=st.sampled_from(["random", "one", "few"]), seed=st.integers(1, 99),
    form=st.sampled_from([{}, {"biases": True}, {"gates": 1}]),
)  # fmt: skip
def test_traffic_is_what_costs_say(
    ranks, tokens, top_k, local, hidden, ffn, factor, routing, seed, form
):
    """Costs equal counted bytes, messages and signals, both ways, and results are correct."""
    top_k = min(top_k, local) if routing == "few" else top_k
    call = Call(
        2, tokens, top_k, local, hidden, ffn, factor=factor, routing=routing, seed=seed, **form
    )
    outcomes = ranks(2).run(_traffic, call)
    itemsize = DTYPES[call.dtype].itemsize
    sizes = {
        "counts": call.counts, "tokens": tokens, "hidden": hidden, "ffn": ffn, "itemsize": itemsize,
        "push_tile": layout.push_tile(hidden, itemsize, SMALL.num_warps, SMALL.push_rows),
        "product_tile": (SMALL.block_m, SMALL.block_n), "gates": call.gates,
    }  # fmt: skip
    for rank, (found, _) in enumerate(outcomes):
        there = costs.forward(rank=rank, **sizes)
        back = costs.backward(rank=rank, number_rows=layout.activation_tile(ffn)[0], **sizes)
        assert found == [(cost.link_bytes, cost.messages, cost.signals) for cost in (there, back)]
        least = costs.floor_link_bytes(
            counts=call.counts, rank=rank, hidden=hidden, itemsize=itemsize
        )
        assert there.link_bytes - least == costs.NUMBER_BYTES * (call.experts + 1)
        assert (
            back.flops
            == 2 * there.flops
            == 4
            * (call.gates + 1)
            * hidden
            * ffn
            * sum(sum(source[rank * local : (rank + 1) * local]) for source in call.counts)
        )
    call.check([results for _, results in outcomes])


def _decoding_traffic(call):
    traffic = interlace.group_of().traffic
    tensors = call.inputs(dist.get_rank())
    traffic.reset()
    y = forward(call, tensors)
    return (traffic.message_bytes, traffic.messages, traffic.signals), [y]


@settings(max_examples=4)
@given(
    tokens=st.integers(1, 20), top_k=st.integers(1, 4), local=st.integers(2, 3),
    hidden=st.integers(1, 70), ffn=st.integers(1, 40), seed=st.integers(1, 99),
    routing=st.sampled_from(["random", "one", "few", "holes"]),
)  # fmt: skip
def test_traffic_of_decoding_is_what_costs_say(
    ranks, tokens, top_k, local, hidden, ffn, routing, seed
):
    """Costs equal counted bytes, messages and signals, and results are correct."""
    top_k = min(top_k, local) if routing == "few" else top_k
    call = Call(2, tokens, top_k, local, hidden, ffn, routing=routing, seed=seed, impl="decode")
    outcomes = ranks(2).run(_decoding_traffic, call)
    chosen = [call.inputs(rank)[1].tolist() for rank in range(2)]
    for rank, (found, _) in enumerate(outcomes):
        cost = costs.decode(
            counts=call.counts,
            copies=costs.copies(chosen, rank, local),
            rank=rank,
            tokens=tokens,
            top_k=top_k,
            hidden=hidden,
            ffn=ffn,
            itemsize=DTYPES[call.dtype].itemsize,
            senders=decode.senders(tokens, hidden, SMALL),
            columns=decode.columns(hidden),
            product_tile=(SMALL.block_m, SMALL.block_n),
        )
        assert found == (cost.link_bytes, cost.messages, cost.signals)
    call.check([results for _, results in outcomes])
