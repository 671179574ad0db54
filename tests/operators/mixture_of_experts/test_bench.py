"""The benchmark's steps, on a small layer and the CPU backend: they run, fused and unfused agree,
and the floor is the costs'.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from interlace import ArgumentError
from interlace.bench import report
from tests.operators.mixture_of_experts.calls import SMALL
from tests.untimed import untimed


def _bench(routing, form):
    from benchmarks import mixture_of_experts as operator

    with untimed():
        shape = operator.ExpertsShape(
            tokens=4, hidden=8, ffn=8, experts=4, top_k=2, routing=routing, dtype=torch.float32,
            form=form,
        )  # fmt: skip
        return operator.bench(shape, dataclasses.replace(SMALL), dist.new_group())


@pytest.mark.parametrize("form", ["swiglu", "gpt-oss"])
def test_every_way_runs(ranks, form):
    first, second = ranks(2).run(_bench, "skewed", form)
    assert first == second
    assert [result["part"] for result in first] == ["combine", "forward", "backward"]
    combine, forward, backward = first
    for result in first:
        summary = report.summarise(result)
        assert (
            summary.fused_us,
            summary.unfused[1],
            summary.compute[1],
            summary.communication[1],
        ) == (10.0, 10.0, 10.0, 10.0)
        assert result["relative_error"] < 1e-5
    assert forward["flops"] == 3 * combine["flops"]
    assert backward["flops"] == 2 * forward["flops"]
    assert 0 < combine["link_bytes"] <= forward["link_bytes"] == backward["link_bytes"]
    name = "skewed" if form == "swiglu" else "skewed, gpt-oss"
    title = f"mixture_of_experts: 4 tokens, 4 x 8 x 8, top 2, {name}, combine, float32, 2 ranks"
    assert report.title("mixture_of_experts", combine) == title


def _tune():
    from benchmarks import mixture_of_experts as operator

    with untimed() as patch:
        patch.setattr(operator, "_launches", lambda case: [])
        patch.setattr(operator, "AXES", {"group_m": (4, 8)})
        shape = operator.ExpertsShape(
            tokens=2, hidden=8, ffn=8, experts=2, top_k=1, dtype=torch.float32
        )
        return operator.tune(shape, dist.new_group())


def test_the_tuner_keeps_what_was_there_in_a_tie(ranks):
    first, second = ranks(2).run(_tune)
    assert first == second
    assert str(first).startswith("block_m=32, block_n=64, block_k=32, group_m=8, ")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"routing": "even"}, "routing must be one of"),
        ({"top_k": 9}, "top_k must be"),
        ({"form": "gelu"}, "form must be one of"),
    ],
)
def test_shapes_that_are_none(change, what):
    from benchmarks.mixture_of_experts import ExpertsShape

    with pytest.raises(ArgumentError, match=what):
        ExpertsShape(**change)


def _tune_decoding():
    from benchmarks import expert_decoding

    with untimed() as patch:
        patch.setattr(expert_decoding.TimedDecoding, "compile", lambda case, config: None)
        patch.setattr(expert_decoding, "AXES", {"block_m": (16, 64)})
        shape = expert_decoding.ExpertsShape(
            tokens=2, hidden=8, ffn=8, experts=2, top_k=1, dtype=torch.float32
        )
        return expert_decoding.tune(shape, dist.new_group())


def test_the_tuner_of_decoding(ranks):
    first, second = ranks(2).run(_tune_decoding)
    assert first == second
    assert str(first).startswith("block_m=32, block_n=64, ")


def _decoding():
    from benchmarks import expert_decoding

    with untimed() as patch:
        patch.setattr(
            expert_decoding,
            "candidates",
            lambda layer: {
                "fused": ("fused", SMALL),
                "decode": ("decode", layer.default_config("decode")),
                "decode (block_m=32)": ("decode", dataclasses.replace(SMALL, block_m=32)),
            },
        )
        shape = expert_decoding.ExpertsShape(
            tokens=3, hidden=8, ffn=12, experts=4, top_k=2, dtype=torch.float32, form="gpt-oss"
        )
        return expert_decoding.bench(shape, group=dist.new_group())


def test_decoding(ranks):
    """Every way is checked and runs, the stock form that gathers tokens, too."""
    first, second = ranks(2).run(_decoding)
    assert first == second
    assert {name: time["role"] for name, time in first["times"].items()} == {
        "fused": "ours",
        "decode": "ours",
        "decode (block_m=32)": "ours",
        "torch._grouped_mm + NCCL all-to-all of known splits": "pair",
        "torch._grouped_mm + NCCL all-gather and reduce-scatter": "pair",
        "both torch._grouped_mm alone": "compute",
        "both NCCL all-to-alls alone": "communication",
    }
    # An expert's three matrices of float32; a rank has two experts.
    assert 3 * 8 * 12 * 4 <= first["weight_bytes"] <= 2 * 3 * 8 * 12 * 4 < first["memory_bytes"]
