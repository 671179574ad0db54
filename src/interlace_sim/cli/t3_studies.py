"""``interlace sim t3-sensitivity`` and ``reproduce t3``: many sub-layers, or many machines."""

from __future__ import annotations

import dataclasses
import time

from rich.table import Table

from interlace.cli.console import make_console
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table
from interlace_sim.cli.progress import show_progress
from interlace_sim.cli.run import Changes, parse_changes
from interlace_sim.cli.t3 import CHANGE, parse_shape, print_product
from interlace_sim.t3 import load_t3_machine, load_t3_model
from interlace_sim.t3.outputs import draw_figures
from interlace_sim.t3.reproduce import Figure, Study, study
from interlace_sim.t3.sensitivity import sensitivity


def run_sensitivity(
    *,
    model: str,
    tensor: int,
    sublayer: str,
    shape: str | None,
    machine: str,
    changes: Changes,
    pairs: bool,
    outputs: Outputs,
) -> None:
    """Simulate one sub-layer with each assumption changed in turn, or two; print the speed-ups."""
    given = parse_changes(changes, CHANGE)
    product = parse_shape(shape) if shape else load_t3_model(model).product(sublayer, tensor)
    loaded = load_t3_machine(machine, given)
    with show_progress("t3-sensitivity") as runs:
        rows = sensitivity(machine, given, product, tensor, pairs=pairs, progress=runs)
    console = make_console()
    print_product(console, product, tensor, loaded, loaded.network.topology)
    columns = ("changed to", *(f"{name}, faster" for name in rows[0].speed_ups))
    table = make_table(*columns, left=("changed to",))
    for row in rows:
        gains = (f"{100 * (gain - 1):.1f} %" for gain in row.speed_ups.values())
        changed = ", ".join(f"{key}={value:g}" for key, value in row.changes.items())
        table.add_row(changed or "as given", *gains)
    console.print(table)
    outputs.write_json(lambda: [dataclasses.asdict(row) for row in rows])
    outputs.say_written(console)


def run_reproduce(
    *, changes: Changes, every_case: bool, outputs: Outputs, workers: int | None
) -> None:
    """Compare every published figure with ours, and list the assumptions with their sources."""
    machine = load_t3_machine(changes=parse_changes(changes, CHANGE))
    started = time.perf_counter()
    with show_progress("reproduce t3") as runs:
        done = study(machine, every_case=every_case, workers=workers, progress=runs)
    console = make_console()
    headings = ("figure", "published", "ours", "difference", "tolerance", "met", "note")
    table = make_table(*headings, left=("figure", "note"))
    for figure in done.figures:
        table.add_row(
            figure.name,
            *_cells(figure),
            "yes" if figure.met else "NO",
            figure.note,
            style=None if figure.met else "bold",
        )
    console.print(table)
    console.print(
        f"{sum(figure.met for figure in done.figures)} of {len(done.figures)} figures within "
        "tolerance.\n"
    )
    console.print(_assumptions(done))
    console.print(f"{time.perf_counter() - started:.1f} s.", style="dim")
    outputs.write("t3.json", done.to_json())
    outputs.write("t3.png", lambda file: draw_figures(done.figures, file))
    outputs.say_written(console)


def _assumptions(done: Study) -> Table:
    headings = ("assumption", "value", "confidence", "source")
    table = make_table(*headings, left=headings)
    for key, value, confidence, source in done.assumptions:
        table.add_row(
            key,
            f"{value:g}" if isinstance(value, float) else ", ".join(f"{v:g}" for v in value),
            confidence,
            source,
        )
    return table


def _cells(figure: Figure) -> tuple[str, str, str, str]:
    # Ratios need two digits where percentages need one.
    digits = 2 if figure.unit == "x" else 1
    unit = "x" if figure.unit == "x" else f" {figure.unit}"
    return (
        f"{figure.published:g}{unit}",
        f"{figure.ours:.{digits}f}{unit}",
        f"{figure.difference:+.{digits}f}",
        f"{figure.tolerance:g}",
    )
