"""The sweep's draws, its steps on the CPU backend, and its figures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.sweep import (
    draw_curves,
    draws_of_any_size,
    geometric_mean,
    markdown,
    ratios_of,
    summary_table,
    today,
)
from interlace.bench.draws import PATTERNS, Draw, draws
from interlace.bench.report import is_disturbed
from interlace.costs.models import models
from interlace.registry import operator_matching, operator_named

GEMM_ALL_REDUCE = operator_named("gemm_all_reduce")
SWEEPS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*sweep*seed*.json"))


def _bench(pattern: tuple[str, str], layout: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.sweep import measure as measure_call
    from interlace.bench import sweep
    from interlace.bench.timing import Timing

    # The first implementation is disturbed twice, the second one always.
    p10s = itertools.chain([5.0, 6.0, 9.0], [1.0, 2.0, 3.0], itertools.repeat(9.0))

    def measure(step: Any, **_: object) -> Timing:
        step(0)
        return Timing(10.0, next(p10s), 11.0, 1.0, 5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "measure", measure)
        patch.setattr(sweep, "_PAUSES_S", (0.0, 0.0, 0.01))
        drawn = Draw(pattern, "a model", "down", 2, 8, 16, 24)
        return measure_call(dataclasses.replace(drawn, **layout), dtype="float32")[0]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_implementation_of_a_draw(ranks: Any, pattern: tuple[str, str]) -> None:
    operator = operator_matching(*pattern).name
    for result in ranks(2).run(_bench, pattern, {}):
        assert result["operator"] == operator
        assert {"fused", "chunked", "unfused"} <= result["times"].keys()
        assert result["left_out"].keys() <= {"symm_mem", "async_tp"}
        assert result["times"]["unfused"]["role"] == "pair"
        assert result["times"]["fused"]["role"] == "ours"
        kernel = "gemv" if operator == "gemm_all_reduce" else "fused"  # of few rows
        assert result["auto"] == kernel, "the cpu backend takes the kernel"
        assert result["relative_error"] < 1e-5
        first, second, *others = result["times"].values()
        assert (first["attempts"], first["p10_us"]) == (3, 9.0)
        assert (second["attempts"], second["p10_us"]) == (3, 3.0)
        assert {each["attempts"] for each in others} == {1}
        assert result["measured"] == kernel, "nothing is measured on the CPU"
        assert ratios_of([result]) == ratios_of([result], "measured") == {operator: [(1.0, 1.0)]}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_draw_of_another_layout(ranks: Any, pattern: tuple[str, str]) -> None:
    layout = {"w_along_k": False, "x_padding": 8, "has_bias": True}
    for result in ranks(2).run(_bench, pattern, layout):
        assert result.items() >= layout.items()
        assert result["relative_error"] < 1e-5
        assert {"fused", "chunked", "unfused"} <= result["times"].keys()


def test_what_the_first_call_measures_is_told() -> None:
    from benchmarks import sweep
    from interlace.gemm.autotune import Measured

    kinds: dict[str, Measured] = {"an earlier call": Measured(GEMM_ALL_REDUCE, {"gemv": 1.0})}

    def call(_: int, impl: str) -> None:
        if impl == "auto":
            kinds["this call"] = Measured(GEMM_ALL_REDUCE, {"fused": 2.0, "chunked": 0.5})

    case: Any = SimpleNamespace(
        owner=SimpleNamespace(cache=SimpleNamespace(measured=kinds)),
        choice=SimpleNamespace(times_us={"fused": 10.0, "chunked": 12.0, "gemv": 14.0}),
        call=call,
    )
    measured = sweep._measure_at_first_call(case)
    assert list(measured.items()) == [("chunked", 6.0), ("fused", 20.0)], "the fastest first"
    assert sweep._measure_at_first_call(case) == {}, "nothing new was measured"


def test_draws_of_any_size() -> None:
    found = list(itertools.islice(draws_of_any_size(7, 2), 800))
    assert found == list(itertools.islice(draws_of_any_size(7, 2), 800))
    assert {draw.pattern for draw in found} == set(PATTERNS)
    for draw in found:
        assert draw.columns % 8 == draw.inner % 8 == 0
        assert min(draw.columns, draw.inner) >= 512
        assert draw.model is draw.layer is draw.shards is None
        if draw.pattern in (("gemm", "all_to_all"), ("all_gather", "gemm")):
            assert draw.rows % 2 == 0
    for share, has in (
        (0.3, [not draw.w_along_k for draw in found]),
        (0.3, [draw.x_padding > 0 for draw in found]),
        (0.25, [draw.has_bias for draw in found]),
        (0.47, [draw.columns % 64 == 0 for draw in found]),
    ):
        assert abs(sum(has) / len(found) - share) < 0.1
    exact = list(itertools.islice(draws_of_any_size(7, 2, "float8_e4m3fn"), 100))
    assert not any(draw.x_padding or draw.has_bias or not draw.w_along_k for draw in exact)


def test_draws_come_again_and_are_what_models_have() -> None:
    found = list(itertools.islice(draws(7, 2), 400))
    assert found == list(itertools.islice(draws(7, 2), 400))
    assert found != list(itertools.islice(draws(8, 2), 400))
    assert len(models()) >= 40
    assert {draw.pattern for draw in found} == set(PATTERNS)
    hidden = {model.name: model.hidden for model in models()}
    for draw in found:
        side = draw.inner if draw.pattern == ("all_gather", "gemm") else draw.columns
        assert side == hidden[draw.model]
        assert min(draw.rows, draw.columns, draw.inner) > 0
        if draw.pattern in (("gemm", "all_to_all"), ("all_gather", "gemm")):
            assert draw.rows % 2 == 0
    odd = sum(draw.rows % 2 for draw in found if draw.pattern == ("gemm", "all_reduce"))
    assert 0.2 < odd / 100 < 0.5, "a third of the numbers of tokens"
    # On one rank no row is added: every token goes to as many experts as the model says.
    chosen = {model.name: model.top_k for model in models()}
    experts = [draw for draw in itertools.islice(draws(7, 1), 100) if draw.layer == "experts"]
    assert experts
    assert all(draw.rows % chosen[draw.model] == 0 for draw in experts)


def _result(operator: str, auto: str, **times: float) -> dict[str, Any]:
    roles = {"unfused": "pair", "symm_mem": "pair"}
    entries = {
        name: {"median_us": us, "role": roles.get(name, "ours"), "impl": name}
        for name, us in times.items()
    }
    return {"operator": operator, "auto": auto, "times": entries}


def _drawn(result: dict[str, Any]) -> dict[str, Any]:
    sizes = {"rows": 64, "columns": 8192, "inner": 2048, "dtype": "bfloat16", "world_size": 2}
    return {**result, **sizes, "config": ""}


def test_ratios(tmp_path: Path) -> None:
    results = [
        _result("gemm_all_reduce", "fused", fused=8.0, chunked=8.0, unfused=20.0, symm_mem=16.0),
        _result("gemm_all_reduce", "chunked", fused=8.0, chunked=32.0, unfused=16.0),
        _result("gemm_all_to_all", "unfused", fused=8.0, unfused=8.0),
    ]
    ratios = ratios_of(results)
    assert ratios == {
        "gemm_all_reduce": [(0.5, 1.0), (2.0, 4.0)],
        "gemm_all_to_all": [(1.0, 1.0)],
    }
    assert math.isclose(geometric_mean([0.5, 2.0]), 1.0)
    draw_curves(ratios, tmp_path / "curves.svg")
    assert "auto / best stock pair" in (tmp_path / "curves.svg").read_text()


def test_every_call_counts_and_those_that_cannot_are_said() -> None:
    """Leaving out calls whose choice was slow in most samples would leave out what it lost."""
    machine = {"gpus": ["NVIDIA H200"] * 2}
    lost = _result("gemm_all_reduce", "fused", fused=40.0, unfused=20.0, symm_mem=16.0)
    lost["times"]["fused"]["p10_us"] = lost["times"]["symm_mem"]["p10_us"] = 13.0
    assert ratios_of([lost]) == {"gemm_all_reduce": [(2.5, 2.5)]}
    assert (
        today(_drawn(lost), "NVIDIA H200")["auto"]
        == today(
            _drawn(_result("gemm_all_reduce", "unfused", fused=40.0, unfused=20.0, symm_mem=16.0)),
            "NVIDIA H200",
        )["auto"]
    ), "by predictions, whatever was lengthened"
    alone = _result("gemm_all_reduce", "fused", fused=8.0)
    untimed = _result("gemm_all_reduce", "chunked", fused=8.0, unfused=20.0)
    results = [lost, alone, untimed]
    assert ratios_of(results) == ratios_of([lost])
    said = (
        "3 calls drawn, 1 measured and counted, 1 since no stock pair could run, 1 since what it "
        "chooses was not timed left out. Other work lengthened 2 of the 6 times, and all count."
    )
    document = {"machine": machine, "date": "2026-11-26", "results": results}
    assert said in markdown([document])
    assert "| `gemm_all_reduce` | 1 | 2.500 | 2.50 |" in markdown([document])
    assert summary_table(ratios_of(results), "Predicted", said).caption == said


def test_the_recorded_sweeps_by_the_shipped_profile() -> None:
    """Two GPUs; their profiles were fitted to some of these calls. Every third one is looked at."""
    documents = [json.loads(file.read_text()) for file in SWEEPS]
    assert len({document["machine"]["gpus"][0] for document in documents}) == 2
    results = []
    for document in documents:
        for result in document["results"][::3]:
            # Predictions are judged by times that other work has not lengthened.
            times = {name: each for name, each in result["times"].items() if not is_disturbed(each)}
            quiet = {**result, "times": times}
            results.append(today(quiet, document["machine"]["gpus"][0]))
    for ratios in ratios_of(results).values():
        pairs, best = zip(*ratios, strict=True)
        assert geometric_mean(pairs) < 0.91
        assert geometric_mean(best) < 1.03
        assert max(pairs) < 1.2
