"""What ``impl="auto"`` runs of the products between a sharded sequence and sharded columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.registry import operator_named
from interlace.testing.cases.sequence import TO_COLUMNS, TO_ROWS
from interlace.tuning.choice import Choice
from interlace.tuning.gpu import Gpu

H200 = "NVIDIA H200"
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MEASURED = json.loads((RESULTS / "2026-11-29-sequence-parallel-2xh200.json").read_text())["results"]
WAYS = ("fused", "pair")


def _choice(
    operator: str, rows: int, *, gpu: str = H200, ranks: int = 2, **sizes: int
) -> Choice[Any]:
    sizes = {"columns": 4096, "inner": 4096} | sizes
    return operator_named(operator).choose(
        rows=rows,
        **sizes,
        dtype=torch.bfloat16,
        device=Gpu(gpu, 132, 232448),
        world_size=ranks,
    )


def _of(measured: dict[str, Any], gpu: str = H200) -> Choice[Any]:
    sizes = {name: measured[name] for name in ("columns", "inner")}
    return _choice(measured["operator"], measured["tokens"], gpu=gpu, **sizes)


@pytest.mark.parametrize("measured", MEASURED)
def test_what_was_measured_to_be_faster_runs(measured: dict[str, Any]) -> None:
    choice = _of(measured)
    assert choice.reason.startswith(f"measured on {H200} at 2 ranks")
    fused_us, pair_us = (measured[way]["graph"]["median_us"] for way in WAYS)
    assert choice.impl == ("fused" if fused_us < pair_us else "unfused")


def test_a_guess_is_as_far_off_as_it_says() -> None:
    """And takes nothing that was measured to be slower."""
    ratios = []
    for measured in MEASURED:
        choice = _of(measured, gpu="NVIDIA H200 SXM")  # of which there is no table
        fused_us, pair_us = (measured[way]["graph"]["median_us"] for way in WAYS)
        guessed = choice.times_us["fused"] / choice.times_us["unfused"]
        ratios.append(guessed * pair_us / fused_us)
        assert choice.impl == "unfused" or fused_us < pair_us
    assert 0.78 < min(ratios) < 0.81
    assert 1.18 < max(ratios) < 1.22


@pytest.mark.parametrize(
    ("operator", "alike"), [(TO_COLUMNS, "gemm_all_to_all"), (TO_ROWS, "all_gather_gemm")]
)
@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H800"])
def test_where_nothing_was_measured(operator: str, alike: str, gpu: str) -> None:
    """The kernel runs where there are rows enough, and the pair where there are few."""
    for rows, impl in ((64, "unfused"), (512, "unfused"), (32768, "fused")):
        choice = _choice(operator, rows, gpu=gpu)
        assert choice.impl == impl
        assert choice.reason.startswith(f"predicted for {gpu}, by the times of {alike}: ")


@pytest.mark.parametrize("operator", [TO_COLUMNS, TO_ROWS])
def test_other_numbers_of_ranks_are_others(operator: str) -> None:
    """A table of two ranks says nothing of eight, and one has nothing to exchange."""
    assert _choice(operator, 8192, ranks=8).reason.startswith(f"predicted for {H200}")
    alone = _choice(operator, 8192, ranks=1)
    assert (alone.impl, alone.reason) == ("unfused", "a rank alone has nothing to exchange")
