"""How far a sweep's choices are from the fastest: figures, a table in Markdown, a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.bench import profile_fit, report
from interlace.bench.roles import is_disturbed
from interlace.costs.known_profiles import profile_of
from interlace.figure import open_figure
from interlace.registry import operator_named

Ratios = Mapping[str, Sequence[tuple[float, float]]]
"""Of each operator the calls' times of ``auto``, as multiples of the fastest stock pair's and of
the fastest implementation's.
"""


def today(result: dict[str, Any], gpu: str) -> dict[str, Any]:
    """Return a result with what ``auto`` takes by today's profile, of the times that it has of
    implementations that still exist.

    Args:
        gpu: The name of the GPU on which the result was measured.
    """
    points = profile_fit.points_of([{"results": [result]}], with_disturbed=True)
    fastest = profile_fit.predicted_fastest(profile_of(gpu), points)
    if fastest is None:
        return result
    words = operator_named(result["operator"]).words
    times = {name: time for name, time in result["times"].items() if name in words}
    return {**result, "auto": fastest.implementation, "times": times}


def ratios_of(results: Iterable[Mapping[str, Any]], choice: str = "auto") -> Ratios:
    """Return how a choice compares in a sweep's results.

    Times count whether or not other work on the machine has lengthened them. Calls are left out
    only for what :func:`why_left_out` says.

    Args:
        choice: ``"auto"``, by predictions; or ``"measured"``, by the first call's measurement.
    """
    ratios: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if why_left_out(result, choice):
            continue
        times = {name: time["median_us"] for name, time in result["times"].items()}
        pairs = [times[name] for name in times if result["times"][name]["role"] == "pair"]
        auto = times[result[choice]]
        row = auto / min(pairs), auto / min(times.values())
        ratios.setdefault(result["operator"], []).append(row)
    return ratios


def why_left_out(result: Mapping[str, Any], choice: str = "auto") -> str:
    """Return why a call's choice cannot be compared; empty if it can."""
    if all(time["role"] != "pair" for time in result["times"].values()):
        return "no stock pair could run"
    return "" if result[choice] in result["times"] else "what it chooses was not timed"


def choices_of(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the choices that all results have: ``"auto"``, and ``"measured"`` in newer ones."""
    return ["auto", "measured"] if all("measured" in result for result in results) else ["auto"]


def counts(results: Sequence[Mapping[str, Any]], choices: Iterable[str]) -> str:
    """Return a sentence on how many calls a table has, and on those that it has not."""
    reasons = Counter(
        next(filter(None, (why_left_out(result, choice) for choice in choices)), "")
        for result in results
    )
    counted = reasons.pop("", 0)
    why = ", ".join(f"{count} since {reason}" for reason, count in reasons.items())
    times = [time for result in results for time in result["times"].values()]
    lengthened = sum(map(is_disturbed, times))
    return (
        f"{len(results)} calls drawn, {counted} measured and counted, {why or 'none'} left out. "
        f"Other work lengthened {lengthened or 'none'} of the {len(times)} times, and all count."
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def markdown(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return all calls of several sweeps as one Markdown table, with a line on their number and on
    each machine.

    The choices are those that ``impl="auto"`` made when the calls were measured.
    """
    documents = list(documents)
    results = [result for document in documents for result in document["results"]]
    choices = choices_of(results)
    columns = [
        f"{name} / {baseline} | worst"
        for name in ("predicted", "measured")[: len(choices)]
        for baseline in ("best stock pair", "best of all")
    ]
    lines = [
        f"| operator | calls | {' | '.join(columns)} |",
        "|---|---:|" + "---:|" * 2 * len(columns),
    ]
    comparable = [
        result for result in results if not any(why_left_out(result, choice) for choice in choices)
    ]
    ratios = [ratios_of(comparable, choice) for choice in choices]
    for operator, rows in ratios[0].items():
        cells = [
            f"{figure(values):.{digits}f}"
            for ratio in ratios
            for values in zip(*ratio[operator], strict=True)
            for figure, digits in ((geometric_mean, 3), (max, 2))
        ]
        lines.append(f"| `{operator}` | {len(rows)} | {' | '.join(cells)} |")
    machines = [
        report.machine_line(document["machine"], document["date"]) for document in documents
    ]
    return "\n".join([*lines, "", counts(results, choices), "", *dict.fromkeys(machines)]) + "\n"


def draw_curves(ratios: Ratios, file: Path) -> None:
    """Draw the fraction of calls up to each ratio, a curve for each operator."""
    with open_figure(file, 9.0, 4.0) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        titles = "auto / best stock pair", "auto / best of all implementations"
        for index, (axis, title) in enumerate(zip(axes, titles, strict=True)):
            for operator, rows in ratios.items():
                values = sorted(row[index] for row in rows)
                fractions = [(i + 1) / len(values) for i in range(len(values))]
                axis.step(values, fractions, where="post", label=operator)
            axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
            axis.set_xlabel(title)
        axes[0].set_ylabel("fraction of calls")
        axes[0].legend(loc="upper left", frameon=False)
