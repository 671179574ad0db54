"""``interlace bench sweep``: random calls of real models, and how far ``auto`` is from the best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.bench import report
from interlace.bench.draws import OPERATORS, draws
from interlace.cli import bench
from interlace.cli.bench_ranks import run_sweep_rank
from interlace.cli.console import make_console
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table

_MOST_DRAWS = 4000


def run_sweep(
    seed: int,
    budget_s: float,
    add: Sequence[Path],
    world_size: int | None,
    dtype: str,
    outputs: Outputs,
) -> None:
    """Measure drawn calls, or add up files of earlier sweeps, and print the figures."""
    if add:
        documents = [bench.read_document(file) for file in add]
        results = [result for document in documents for result in document["results"]]
        document = {**documents[0], "results": results}
    else:
        bench.require_dtype(dtype, ("bfloat16", "float16"))
        work = list(itertools.islice(draws(seed, world_size or 2), _MOST_DRAWS))
        document = bench.measure_on_gpus(
            "bench",
            "Measuring random calls",
            work,
            run_sweep_rank,
            (dtype, budget_s),
            world_size,
            outputs,
        )
    console = make_console()
    console.print(summary_table(summaries(document["results"])))
    console.print(report.machine_line(document["machine"], document["date"]))
    outputs.say_written(console, "All numbers")


def summaries(results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the figures of each operator: number of calls, and how ``auto`` compares.

    ``pair`` is the time of what ``auto`` takes as a multiple of the fastest stock pair's, ``best``
    as a multiple of the fastest implementation's: geometric mean and worst of all calls.
    """
    figures = {}
    for operator in OPERATORS:
        ratios = [ratios_of(result) for result in results if result["operator"] == operator]
        if ratios:
            pair, best = zip(*ratios, strict=True)
            figures[operator] = {
                "calls": len(ratios),
                "pair": geometric_mean(pair),
                "worst_pair": max(pair),
                "best": geometric_mean(best),
                "worst_best": max(best),
            }
    return figures


def ratios_of(result: Mapping[str, Any]) -> tuple[float, float]:
    """Return the time of ``auto`` as a multiple of the best stock pair's and of the best of all."""
    times = {name: time["median_us"] for name, time in result["times"].items()}
    pairs = [times[name] for name, time in result["times"].items() if time["role"] == "pair"]
    auto = times[result["auto"]]
    return auto / min(pairs), auto / min(times.values())


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def summary_table(figures: Mapping[str, Mapping[str, float]]) -> Any:
    """Return the figures as a table for the terminal."""
    table = make_table(
        "operator", "calls", "auto / best stock pair", "worst", "auto / best of all", "worst "
    )
    for operator, figure in figures.items():
        ratios = (figure[name] for name in ("pair", "worst_pair", "best", "worst_best"))
        table.add_row(operator, str(figure["calls"]), *(f"{ratio:.3f}" for ratio in ratios))
    return table
