"""The picture of a study says in its title what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interlace.cli.picture import _study_finding, draw_study


def _result(shape: str, times_us: dict[tuple[str, int], float]) -> dict[str, Any]:
    points = [
        {"order": order, "occupancy_percent": percent, "median_us": time}
        | {"p10_us": time, "p90_us": time, "skew_us": 1.0}
        for (order, percent), time in times_us.items()
    ]
    return {"shape": shape, "dtype": "float32", "points": points}


def test_the_title_names_the_share_and_the_orders_that_never_win(tmp_path: Path) -> None:
    first = {("a", 50): 2.0, ("a", 100): 3.0, ("b", 50): 4.0, ("b", 100): 5.0}
    results = [_result("one", first), _result("two", first | {("a", 100): 1.0})]
    results.append(_result("three", first | {("b", 50): 1.0}))
    assert _study_finding(results[:2]) == (
        "50 % of the programs that fit are fastest in 1 of 2 shapes; never fastest: b"
    )
    assert _study_finding(results) == "50 % of the programs that fit are fastest in 2 of 3 shapes"
    draw_study({"results": results}, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 0
