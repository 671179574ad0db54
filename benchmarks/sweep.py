"""``interlace bench sweep``: random calls of models or of none, and how far ``impl="auto"`` is from
the fastest implementation, in figures, a table in Markdown and a picture.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from interlace.bench import machine_profile, report
from interlace.bench.draws import MOST_FLOPS, MOST_LOG2_TOKENS, Draw, draws, in_turn
from interlace.bench.machine_profile import MeasuredPoint
from interlace.bench.report import is_disturbed
from interlace.cli import bench
from interlace.cli.console import make_console, make_table
from interlace.cli.options import Run
from interlace.cli.outputs import Outputs
from interlace.costs.known_profiles import profile_of
from interlace.costs.time import MachineProfile
from interlace.figure import open_figure
from interlace.registry import operator_named, operators
from interlace.units import round_up

if TYPE_CHECKING:
    from interlace.bench.products import TimedProduct

_MOST_DRAWS = 4000
_LOG2_SIDES = (9, 15)
_SIDE_MULTIPLES = (8, 8, 64, 64, 200)
_X_PADDING = 64

Ratios = Mapping[str, Sequence[tuple[float, float]]]
"""Of each operator the calls' times of ``auto``, as multiples of the fastest stock pair's and of
the fastest implementation's.
"""


def run_sweep(
    seed: int,
    budget_s: float,
    add: Sequence[Path],
    any_size: bool,
    world_size: int | None,
    dtype: str,
    outputs: Outputs,
) -> None:
    """Measure drawn calls, or add up files of earlier sweeps, and print the figures.

    Args:
        any_size: Whether calls are drawn that no model need have.
    """
    if add:
        documents = [report.read_document(file) for file in add]
        results = [
            today(result, document["machine"]["gpus"][0])
            for document in documents
            for result in document["results"]
        ]
        document = {**documents[0], "results": results}
    else:
        bench.require_dtype(dtype, tuple(MOST_FLOPS))
        draw = draws_of_any_size if any_size else draws
        work = list(itertools.islice(draw(seed, world_size or 2, dtype), _MOST_DRAWS))
        with bench.nothing_measured():
            document = bench.measure_on_gpus(
                "bench",
                "Measuring random calls",
                work,
                measure,
                Run(world_size, dtype, outputs),
                budget_s,
            )
    console, results = make_console(), document["results"]
    ratios = ratios_of(results)
    titles = dict(
        zip(choices_of(results), ("Predicted", "Measured at the first call"), strict=False)
    )
    for choice, title in titles.items():
        console.print(summary_table(ratios_of(results, choice), title, counts(results, [choice])))
    console.print(report.machine_line(document["machine"], document["date"]))
    outputs.write_plot(lambda file: draw_curves(ratios, file))
    outputs.say_written(console, "All numbers")


def measure(draw: Draw, *, dtype: str) -> list[dict[str, Any]]:
    """Check and time all implementations of one drawn call; collective.

    Returns:
        One result, as ``interlace tune machine`` makes it, in which ``measured`` is the
        implementation that ``impl="auto"`` takes within :func:`interlace.autotune`.
    """
    # Triton, which tables of results do without.
    from interlace.bench.sweep import operands_of, time_implementations

    case = operands_of(draw, dtype)
    result = time_implementations(case, draw)
    times_us = _measure_at_first_call(case)
    case.owner.release()
    return [{**result, "measured": next(iter(times_us), result["auto"]), "measured_us": times_us}]


def _measure_at_first_call(case: TimedProduct) -> dict[str, float]:
    """Return the times in microseconds that the first call measures, that of the implementation
    that it then takes first; empty if there is only one implementation worth measuring.
    """
    from interlace.gemm.autotune import Measured, autotune

    before = len(case.owner.cache.measured)
    with autotune():
        case.call(0, "auto")
    kinds: list[Measured] = list(case.owner.cache.measured.values())[before:]
    # A call has one kind, if any.
    return kinds[0].times_us(case.choice.times_us) if kinds else {}


def summary_table(ratios: Ratios, title: str = "", caption: str = "") -> Table:
    """Return geometric means and the worst calls as a table for the terminal."""
    table = make_table(
        "operator",
        "calls",
        "auto / pair",
        "worst",
        "auto / best",
        "worst ",
        title=title or None,
    )
    for operator, rows in ratios.items():
        cells = [
            f"{figure(values):.3f}"
            for values in zip(*rows, strict=True)
            for figure in (geometric_mean, max)
        ]
        table.add_row(operator, str(len(rows)), *cells)
    table.caption, table.caption_justify = caption or None, "left"
    return table


def draws_of_any_size(seed: int, world_size: int, dtype: str = "bfloat16") -> Iterator[Draw]:
    """Yield calls without end that no model need have, each operator in turn.

    Columns and inner dimension are drawn between 512 and 32768, each power of two as likely as any
    other, as multiples of 8, 64 or 200; rows as :func:`draws` draws tokens, a third of them odd.
    Three weights of ten are contiguous along N, three inputs of ten have padding behind their rows,
    and a quarter of the calls has a bias. Float8 has none of these, which it supports nowhere.

    Args:
        seed, world_size, dtype: As :func:`draws` takes them.
    """
    chance = random.Random(seed)
    drawn = in_turn(lambda pattern: _any_draw(pattern, chance, world_size), dtype)
    if not dtype.startswith("float8"):
        return drawn
    return (
        dataclasses.replace(each, w_along_k=True, x_padding=0, has_bias=False) for each in drawn
    )


def _any_draw(pattern: tuple[str, str], chance: random.Random, world_size: int) -> Draw:
    multiple = chance.choice(_SIDE_MULTIPLES)
    columns, inner = (
        max(multiple, round(2 ** chance.uniform(*_LOG2_SIDES) / multiple) * multiple)
        for _ in range(2)
    )
    rows = round(2 ** chance.uniform(0, MOST_LOG2_TOKENS))
    rows = rows | 1 if chance.random() < 1 / 3 else round_up(rows, 8)
    if {"all_to_all", "all_gather"} & set(pattern):
        rows = round_up(rows, world_size)
    return Draw(
        pattern,
        model=None,
        layer=None,
        shards=None,
        rows=rows,
        columns=columns,
        inner=inner,
        w_along_k=chance.random() >= 0.3,
        x_padding=_X_PADDING if chance.random() < 0.3 else 0,
        has_bias=chance.random() < 0.25,
    )


def today(result: dict[str, Any], gpu: str) -> dict[str, Any]:
    """Return a result with what ``auto`` takes by today's profile, of the times that it has of
    implementations that still exist.

    Args:
        gpu: The name of the GPU on which the result was measured.
    """
    points = machine_profile.points_of([{"results": [result]}], with_disturbed=True)
    fastest = predicted_fastest(profile_of(gpu), points)
    if fastest is None:
        return result
    words = operator_named(result["operator"]).words
    times = {name: time for name, time in result["times"].items() if name in words}
    return {**result, "auto": fastest.implementation, "times": times}


def predicted_fastest(
    profile: MachineProfile, points: Iterable[MeasuredPoint]
) -> MeasuredPoint | None:
    """Return the point of one call that ``impl="auto"`` takes; None if the profile knows none."""
    known = {}
    for point in points:
        us = point.predicted_us(profile)
        if us is not None:
            known[point.implementation] = us, point
    if not known:
        return None
    declaration = operators()[next(iter(known.values()))[1].operator]
    times_us = {name: us for name, (us, _) in known.items()}
    return known[profile.in_order(times_us, declaration.preferred_among(known))[0]][1]


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
