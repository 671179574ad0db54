"""The model of time of layers of experts: its parts, its points, and what ``auto`` makes of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import profile_fit
from interlace.bench import machine_profile
from interlace.costs.datasheets import DATASHEETS
from interlace.costs.known_profiles import profile_of
from interlace.costs.mixture_of_experts import ExpertsCall
from interlace.costs.time import MachineProfile
from interlace.operators.mixture_of_experts import choice
from interlace.operators.mixture_of_experts.config import MixtureOfExpertsConfig, untuned_config
from interlace.operators.mixture_of_experts.layout import ExpertSizes
from interlace.registry import operator_named
from interlace.tuning.choice import Choice

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
H200 = profile_of("NVIDIA H200")
OPERATOR = "mixture_of_experts"
MIXTRAL = ExpertsCall(tokens=16, hidden=4096, ffn=14336, experts=8, top_k=2, world_size=2)
MADE = {
    "fused": {"fixed": 30.0, "product": 1.05, "link": 0.1},
    "decode": {"fixed": 12.0, "product": 1.02, "rows": 40.0},
    "unfused": {"fixed": 60.0, "product": 1.1, "link": 1.2, "rows": 5.0},
}


def test_busy_experts_are_those_that_some_token_names() -> None:
    """One token of each of two ranks leaves an expert alone with a chance of 3/4 each."""
    one = dataclasses.replace(MIXTRAL, tokens=1)
    assert one.busy == pytest.approx(4 * (1 - 0.75**2))
    assert MIXTRAL.busy == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(3, 4, 1), (16, 8, 2), (100, 16, 4)])
def test_tiles_are_the_mean_over_routings(tokens: int, experts: int, top_k: int) -> None:
    call = ExpertsCall(tokens, 64, 64, experts, top_k, 2)
    chance, found = random.Random(7), 0
    for _ in range(300):
        counts = [0] * experts
        for _ in range(2 * tokens):
            for expert in chance.sample(range(experts), top_k):
                counts[expert] += 1
        found += sum(-(-count // 16) for count in counts[: experts // 2])
    assert call.tiles_of_rows(16) == pytest.approx(found / 300, rel=0.06)


def test_parts() -> None:
    parts = MIXTRAL.parts_us(H200, OPERATOR, "by_slot", (128, 256))
    bytes_per_us = H200.product.memory_bytes_per_s / 1e6
    weights_us = 4 * 3 * 4096 * 14336 * 2 / bytes_per_us
    assert parts["memory"] == pytest.approx(weights_us, rel=1e-3)
    assert parts["product"] == parts["memory"], "few rows: weights take longer than tiles"
    # Half of 32 slots leave, and as many results come back.
    assert parts["link"] == pytest.approx(2 * 16 * 4096 * 2 / H200.link_bytes_per_s * 1e6)
    assert parts["longer"] == max(parts["product"], parts["link"])
    assert (parts["fixed"], parts["peers"]) == (1.0, 0.0)
    # A token goes to a rank once: 3 of 14 pairs of experts are both on the other rank.
    by_token = MIXTRAL.parts_us(H200, OPERATOR, "by_token", (16, 64))
    assert by_token["link"] / parts["link"] == pytest.approx((16 * (1 - 3 / 14) + 16) / 32)
    to_all = MIXTRAL.parts_us(H200, OPERATOR, "to_all", (128, 128))
    assert to_all["link"] == pytest.approx(parts["link"]), "all tokens there, all sums back"
    assert to_all["rows"] == 2 * parts["rows"]


def test_many_tokens_are_limited_by_their_product() -> None:
    many = dataclasses.replace(MIXTRAL, tokens=4096)
    parts = many.parts_us(H200, OPERATOR, "by_slot", (128, 256))
    flops = 6 * 4096 * 2 * 4096 * 14336
    assert parts["product"] > 3 * parts["memory"]
    assert parts["product"] == pytest.approx(flops / H200.product.flops_per_s * 1e6, rel=0.1)


def test_float32_has_no_tensor_cores() -> None:
    half, single = (
        dataclasses.replace(MIXTRAL, tokens=512, itemsize=itemsize) for itemsize in (2, 4)
    )
    parts = [each.parts_us(H200, OPERATOR, "by_token", (16, 64)) for each in (half, single)]
    assert parts[1]["memory"] == 2 * parts[0]["memory"]
    assert parts[1]["product"] > 100 * parts[0]["product"]


def _result(tokens: int, **changes: Any) -> dict[str, Any]:
    """A benchmark's result with the times that ``MADE`` composes."""
    profile = dataclasses.replace(H200, compositions={OPERATOR: MADE}, corrections={})
    call = dataclasses.replace(MIXTRAL, tokens=tokens)
    schedules = {"fused": "by_slot", "decode": "by_token", "unfused": "to_all"}
    times = {}
    for name, schedule in schedules.items():
        us = profile.predict_us(OPERATOR, name, call, schedule, choice.tile_of(name, call))  # type: ignore[arg-type]
        times[name] = {
            "role": "pair" if name == "unfused" else "ours",
            "impl": name,
            "median_us": us,
        }
    return {
        "operator": OPERATOR, "part": "decoding", "routing": "balanced", "dtype": "bfloat16",
        "config": "block_m=16", "times": times,
        **{name: getattr(call, name) for name in ("tokens", "hidden", "ffn", "experts", "top_k")},
        "world_size": 2, **changes,
    }  # fmt: skip


def test_a_fit_finds_the_times_that_a_benchmark_measured() -> None:
    results = [_result(4**i) for i in range(9)]
    points = machine_profile.points_of([{"results": results}])
    assert len(points) == 27
    fitted = profile_fit.fitted(H200, points)
    assert set(fitted.compositions[OPERATOR]) == set(MADE)
    assert all(
        ratio == pytest.approx(1, abs=0.01) for ratio in machine_profile.errors(fitted, points)
    )
    unseen = profile_fit.unseen_choices(fitted, points)[OPERATOR]
    assert max(ratio for ratio, _ in unseen) <= 1.03


@pytest.mark.parametrize("changes", [{"part": "backward"}, {"routing": "skewed"}])
def test_results_of_other_passes_and_routings_are_no_points(changes: dict[str, Any]) -> None:
    assert machine_profile.points_of([{"results": [_result(16, **changes)]}]) == []


def _times(
    tokens: int, top_k: int = 2, *, keeps: bool = False, capacity: int = 1 << 20
) -> dict[str, float]:
    profile = dataclasses.replace(H200, compositions={OPERATOR: MADE}, corrections={})
    sizes = ExpertSizes(tokens, top_k, 8, 4096, 14336, 2, capacity)
    terms = choice.ExpertTerms(sizes, torch.bfloat16, "cuda", keeps)
    return choice.predicted_times(profile, terms)


def _predicted(profile: MachineProfile, call: ExpertsCall) -> dict[str, float]:
    times_us = {
        each.name: profile.predict_us(
            OPERATOR, each.name, call, each.schedule, choice.tile_of(each.name, call)
        )
        for each in operator_named(OPERATOR).implementations
    }
    return {name: us for name, us in times_us.items() if us is not None}


def test_auto_takes_the_fastest_of_all_measured_calls() -> None:
    """Of few tokens ``decode``, of many ``fused``; also by the compositions alone."""
    documents = [
        json.loads((RESULTS / name).read_text()) for name in H200.results if OPERATOR in name
    ]
    measured: dict[ExpertsCall, dict[str, float]] = {}
    for point in machine_profile.points_of(documents):
        if isinstance(point.call, ExpertsCall):
            measured.setdefault(point.call, {})[point.implementation] = point.us
    both = {"decode", "fused"}
    compared = {call: times for call, times in measured.items() if both <= times.keys()}
    assert len(compared) == 27
    for profile, most in ((H200, 1.01), (dataclasses.replace(H200, corrections={}), 1.07)):
        for call, times_us in compared.items():
            predicted_us = _predicted(profile, call)
            chosen = min(predicted_us, key=predicted_us.__getitem__)
            assert times_us[chosen] <= most * min(times_us.values()), (call, chosen)


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("sizes", [(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 64, 8)])
def test_no_prediction_is_faster_than_tensor_cores(
    gpu: str, sizes: tuple[int, int, int, int]
) -> None:
    """A fit to few tokens alone said of many that they take a third of it."""
    hidden, ffn, experts, top_k = sizes
    for tokens, ranks in itertools.product((256, 1024, 4096, 16384), (1, 2, 4)):
        call = ExpertsCall(tokens, hidden, ffn, experts, top_k, ranks)
        flops = 6 * tokens * top_k * hidden * ffn
        for name, us in _predicted(profile_of(gpu), call).items():
            assert us > flops / (DATASHEETS[gpu].tera_flops * 1e6), (name, call)


def test_slots_beyond_the_number_of_experts_are_empty() -> None:
    assert _times(16, 10) == _times(16, 8)


def test_auto_takes_what_is_predicted_to_be_fastest() -> None:
    few, many = _times(16), _times(16384)
    assert min(few, key=few.__getitem__) == "decode"
    assert min(many, key=many.__getitem__) == "fused"
    terms = choice.ExpertTerms(
        ExpertSizes(16, 2, 8, 4096, 14336, 2, 16), torch.bfloat16, "cuda", False
    )
    trained = Choice("fused", MixtureOfExpertsConfig(block_m=64), "measured")

    def chosen_of(tabulated: Choice[Any], times_us: dict[str, float]) -> Choice[Any]:
        config_of = functools.partial(choice._config_of, terms=terms, tabulated=tabulated)
        return choice.fastest(OPERATOR, H200, times_us, config_of)

    chosen = chosen_of(trained, few)
    assert (chosen.impl, chosen.is_known) == ("decode", True)
    assert chosen.config == untuned_config("decode", terms.call), "the table's is of the fused one"
    tuned = Choice("decode", MixtureOfExpertsConfig(block_m=32), "measured")
    assert chosen_of(tuned, few).config == tuned.config
    assert chosen_of(trained, many).config == trained.config
    assert chosen.candidates[-1] == "unfused"
    assert chosen.reason.startswith("predicted for NVIDIA H200: decode ")


def test_training_and_capacities_are_for_the_fused_kernels() -> None:
    assert set(_times(16, keeps=True)) == {"fused"}
    assert set(_times(16, capacity=4)) == {"fused"}
    assert set(_times(16, capacity=16)) == {"fused", "decode", "unfused"}
