"""``mixture_of_experts`` with float8 weights and scales of blocks, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import interlace
from interlace import MixtureOfExpertsConfig
from interlace.costs import mixture_of_experts as costs
from interlace.errors import ArgumentError
from interlace.operators.mixture_of_experts import decode, fused, layout
from tests.operators.mixture_of_experts.float8 import Float8Call, run_all

POINTERS = MixtureOfExpertsConfig(
    block_m=16, block_n=128, block_k=128, group_m=2, num_warps=4, programs=2, push_programs=2,
    push_rows=8, sum_programs=2, stagger=0,
)  # fmt: skip

NARROW = dataclasses.replace(POINTERS, block_m=32, block_n=64)


def _calls(world_size: int) -> list[Float8Call]:
    base = Float8Call(world_size)
    changes: list[dict[str, Any]] = [
        {},
        {"impl": "decode"},
        {"impl": "unfused", "tokens": 5},
        {"ffn": 384, "hidden": 128, "local": 3, "routing": "few", "config": POINTERS},
        {"routing": "holes", "dtype": torch.float16, "tokens": 40, "config": POINTERS},
        {"routing": "holes", "impl": "decode", "hidden": 384, "tokens": 20},
        {"impl": "decode", "ffn": 384, "tokens": 20, "config": NARROW},
        {"impl": "decode", "ffn": 256, "config": dataclasses.replace(NARROW, block_n=32)},
        {"routing": "zeros"},
        {"routing": "zeros", "impl": "unfused"},
        {"tokens": 0},
    ]
    chosen = {1: changes[:3], 2: changes, 4: changes[:2]}[world_size]
    return [dataclasses.replace(base, seed=i, **change) for i, change in enumerate(chosen)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_matches_float64(ranks: Any, world_size: int) -> None:
    calls = _calls(world_size)
    results = ranks(world_size).run(run_all, calls)
    for i, call in enumerate(calls):
        call.check([mine[i] for mine in results])


def test_fused_and_decode_have_the_same_bits(ranks: Any) -> None:
    """Both round at the same places and add along K in the same order."""
    calls = [Float8Call(2, seed=3, impl=impl) for impl in ("fused", "decode")]
    for first, second in ranks(2).run(run_all, calls):
        assert torch.equal(first, second)


def _traffic(call: Float8Call) -> tuple[int, int, int]:
    traffic = interlace.group_of().traffic
    traffic.reset()
    call.run()
    return traffic.message_bytes, traffic.messages, traffic.signals


@pytest.mark.parametrize("hidden", [128, 384])
@pytest.mark.parametrize("impl", ["fused", "decode"])
def test_traffic_is_what_costs_say(ranks: Any, impl: str, hidden: int) -> None:
    """Half the bytes go there, and a scale for each 128 of them; as many as ever come back."""
    call = Float8Call(2, 9, 2, hidden=hidden, routing="few", impl=impl, config=POINTERS, seed=5)
    chosen = [call.inputs(rank)["experts"] for rank in range(2)]
    sizes: dict[str, Any] = {
        "counts": [torch.bincount(each.flatten(), minlength=4).tolist() for each in chosen],
        "tokens": 9, "hidden": hidden, "ffn": call.ffn, "itemsize": 2, "is_float8": True,
        "product_tile": (POINTERS.block_m, POINTERS.block_n),
    }  # fmt: skip
    for rank, found in enumerate(ranks(2).run(_traffic, call)):
        if impl == "fused":
            tile = layout.push_tile(hidden, 2, POINTERS.num_warps, POINTERS.push_rows)
            cost = costs.forward(rank=rank, push_tile=tile, **sizes)
        else:
            cost = costs.decode(
                rank=rank, top_k=2, senders=decode.senders(9, hidden, POINTERS),
                copies=costs.copies([each.tolist() for each in chosen], rank, 2),
                columns=decode.columns(hidden), **sizes,
            )  # fmt: skip
        assert found == (cost.link_bytes, cost.messages, cost.signals)


def test_rows_arrive_in_half_the_memory() -> None:
    sizes = layout.ExpertSizes(64, 2, 4, 512, 256, 2, 64)
    float8 = fused.buffer_bytes(sizes, torch.bfloat16, is_float8=True)
    assert float8 == sizes.arrivals * (512 + 4 * 4)
    assert float8 < 0.52 * fused.buffer_bytes(sizes, torch.bfloat16)


def _tensors(**changes: Any) -> dict[str, Any]:
    return {**Float8Call(1).inputs(0), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_in_scale": None}, r"w_in_scale must be \[L, F / 128, 2, .* = \[2, 1, 2, 2\]"),
        ({"w_out_scale": torch.ones(2, 1, 1)}, r"w_out_scale must be .* got shape \[2, 1, 1\]"),
        ({"w_out_scale": torch.ones(2, 2, 1).double()}, "w_out_scale must"),
        ({"x": torch.zeros(7, 256)}, "x must be float16 or bfloat16"),
        ({"w_out": torch.zeros(2, 256, 128)}, "w_out must"),
        ({"b_out": torch.zeros(2, 256, dtype=torch.bfloat16)}, "must have no biases"),
        (
            {"x": torch.zeros(7, 256, dtype=torch.bfloat16, requires_grad=True)},
            "x must not require a gradient where weights are float8",
        ),
        (
            {"w_in": torch.zeros(2, 128, 2, 256).to(torch.float8_e4m3fn)},
            r"must be contiguous as \[L, 2, F, hidden\]",
        ),
        (
            {"impl": "fused", "config": MixtureOfExpertsConfig(block_n=256, block_k=128)},
            "config must have block_k = 128, block_n = 128",
        ),
        (
            {"impl": "decode", "config": MixtureOfExpertsConfig(block_n=256, block_k=128)},
            "config must have block_k = 128, block_n of at most 128",
        ),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        interlace.mixture_of_experts(**_tensors(**changes))


def test_scales_of_other_weights() -> None:
    tensors = {
        name: tensor.bfloat16() if name.startswith("w_") and "scale" not in name else tensor
        for name, tensor in _tensors().items()
    }
    with pytest.raises(ArgumentError, match="must be given for float8 weights only"):
        interlace.mixture_of_experts(**tensors)


def test_odd_sizes() -> None:
    tensors = _tensors(
        w_in=torch.zeros(2, 2, 96, 256).to(torch.float8_e4m3fn).transpose(1, 2),
        w_out=torch.zeros(2, 256, 96).to(torch.float8_e4m3fn),
    )
    with pytest.raises(ArgumentError, match="multiples of 128"):
        interlace.mixture_of_experts(**tensors)


def test_explanation() -> None:
    tensors = _tensors()
    scales = {name: tensors.pop(name) for name in ("w_in_scale", "w_out_scale")}
    text = interlace.explain("mixture_of_experts", *tensors.values(), **scales)
    assert "bfloat16 with weights of float8" in text
