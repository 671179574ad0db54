"""``interlace sim sweep``: many runs, their table and their picture."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.cache_folder import cache_folder
from interlace.cli.console import make_console, make_table
from interlace.cli.outputs import Outputs
from interlace.errors import ConfigError
from interlace.units import format_ns
from interlace_sim import plot, sweeps
from interlace_sim.cli.progress import show_progress
from interlace_sim.cli.run import Changes, scenario
from interlace_sim.collectives import ALGORITHMS


def run_sweep(
    workload: str,
    parameters: Sequence[str],
    value: str,
    *,
    changes: Changes,
    workers: int | None,
    cache: Path | None,
    no_cache: bool,
    outputs: Outputs,
    **options: Any,
) -> None:
    """Run every combination of some parameters' values; print a table and draw a heat map.

    The heat map spans the first two parameters, and shows the mean over the others.
    """
    if value not in sweeps.VALUES:
        raise ConfigError(f"--value must be one of {', '.join(sweeps.VALUES)}; got {value!r}.")
    values: dict[str, list[Any]] = {}
    for text in parameters:
        name, of_this = sweeps.parse_parameter(text)
        if name in values:
            raise ConfigError(
                f"a parameter must be given once; got {name} twice. Say all of its values at once: "
                f"--param {name}=A,B."
            )
        values[name] = of_this
    if workload in ALGORITHMS:
        options["algorithm"] = options["algorithm"] or ALGORITHMS[workload][0]
    base = scenario(workload, options, changes)
    # --no-cache wins over --cache, so that a script can add it to any command.
    folder = None if no_cache else cache or cache_folder("sim")
    started = time.perf_counter()
    with show_progress(f"sweep {workload}") as runs:
        points = sweeps.sweep(base, values, workers=workers, cache_folder=folder, progress=runs)
    console = make_console()
    table = make_table(*values, "step", "exposed", "bound", "saved", left=())
    for point in points:
        cells = [str(item) for item in point.parameters.values()]
        figures = [
            format_ns(point.total_ns),
            format_ns(point.exposed_ns),
            format_ns(point.bound_ns),
            f"{point.saved_percent:.1f} %",
        ]
        table.add_row(*cells, *(["not run", "", "", ""] if point.error else figures))
    console.print(table)
    for reason in dict.fromkeys(point.error for point in points if point.error):
        console.print(f"Not run: {reason}", style="dim")
    # Remembered points take no time, so the line says how many of them there are.
    fresh = sum(not point.cached for point in points)
    console.print(
        f"{len(points)} points, {len(points) - fresh} of them remembered; "
        f"{time.perf_counter() - started:.1f} s.",
        style="dim",
    )
    outputs.write_json(
        lambda: {
            "scenario": dataclasses.asdict(base.complete()),
            "points": [dataclasses.asdict(point) for point in points],
        }
    )
    outputs.write_csv(lambda: sweeps.to_csv(points))
    outputs.write_plot(lambda file: _heat_map(points, values, value, workload, file))
    outputs.say_written(console)


def _heat_map(
    points: Sequence[sweeps.Point],
    values: Mapping[str, Sequence[Any]],
    value: str,
    workload: str,
    file: Path,
) -> None:
    names = list(values)
    rows, columns = names[0], names[1] if len(names) > 1 else None
    # With one parameter the heat map is a single column.
    grid = []
    for row in values[rows]:
        line = []
        for column in values[columns] if columns else [None]:
            selected = [
                getattr(point, value)
                for point in points
                if not point.error
                and point.parameters[rows] == row
                and (columns is None or point.parameters[columns] == column)
            ]
            # A combination that could not be run leaves its cell empty, which NaN is in the
            # picture.
            line.append(sum(selected) / len(selected) if selected else float("nan"))
        grid.append(line)
    scale, unit = (
        (1e6, "ms") if value.endswith("_ns") else (1, "%" if value.endswith("percent") else "")
    )
    titles = {
        "total_ns": "time of a step",
        "exposed_ns": "exposed communication",
        "bound_ns": "physical bound",
        "saved_percent": "time saved by fusing",
    }
    plot.heat_map(
        [_short(item) for item in values[rows]],
        [_short(item) for item in values[columns]] if columns else [""],
        [[cell / scale for cell in line] for line in grid],
        f"{workload}: {titles.get(value, value)}, {unit}".rstrip(", "),
        (rows, columns or ""),
        file,
    )


def _short(value: Any) -> str:
    """Shorten a number for an axis: ``25000000000.0`` becomes ``"25e9"``."""
    if isinstance(value, float):
        return f"{value / 1e9:g}e9" if value >= 1e8 else f"{value:g}"
    return str(value)
