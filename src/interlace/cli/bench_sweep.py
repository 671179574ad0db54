"""``interlace bench sweep``: random calls of models or of none, and how far ``auto`` is from the
best.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from interlace.bench import report
from interlace.bench.draws import MOST_FLOPS, draws, draws_of_any_size
from interlace.bench.measures import measure_draw
from interlace.bench.sweep_report import (
    Ratios,
    choices_of,
    counts,
    draw_curves,
    geometric_mean,
    ratios_of,
    today,
)
from interlace.cli import bench
from interlace.cli.console import make_console
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table

_MOST_DRAWS = 4000


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
                functools.partial(measure_draw, dtype=dtype),
                world_size,
                outputs,
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
