"""``interlace sim study t3``, ``t3-layer`` and ``t3-sensitivity``."""

from __future__ import annotations

import dataclasses
import time

from rich.table import Table

from interlace.cli.console import make_console
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table
from interlace.units import format_ns
from interlace_sim.cli.progress import show_progress
from interlace_sim.cli.run import Changes, machine_changes
from interlace_sim.cli.t3 import parse_shape, print_product
from interlace_sim.t3 import estimate, load_t3_machine, load_t3_model
from interlace_sim.t3.endtoend import REDUCED
from interlace_sim.t3.outputs import draw_figures
from interlace_sim.t3.reproduce import Figure, Study, study
from interlace_sim.t3.sensitivity import sensitivity

FASTER = ("t3", "t3-mca", "ideal")
"""Configurations whose speed-ups a layer's table shows."""


def run_layer(
    *,
    model: str,
    tensor: int,
    machine: str,
    changes: Changes,
    sequences: int,
    rest_share: float,
    outputs: Outputs,
) -> None:
    """Estimate a layer in training, for a prompt, and in the generation of tokens."""
    loaded = load_t3_machine(machine, machine_changes(changes))
    layers = load_t3_model(model)
    with show_progress("t3-layer") as runs:
        estimates = {
            phase: estimate(
                loaded,
                layers,
                tensor,
                phase,
                tokens=sequences if phase == "generation" else None,
                rest_share=rest_share,
            )
            for phase in runs.over(tuple(REDUCED))
        }
    console = make_console()
    table = make_table(
        "layer",
        "tokens",
        "all-reduced",
        "other products",
        "not sliced",
        "sequential",
        *(f"{name}, faster" for name in FASTER),
    )
    for phase, layer in estimates.items():
        # Shares refer to the sequential layer, which all configurations are compared with.
        total = layer.layer_ns("sequential")
        # The three parts of a layer add up to all of its time.
        parts = (
            layer.reduced_ns["sequential"] / total,
            layer.products_ns / total,
            layer.rest_ns / total,
        )
        table.add_row(
            phase,
            str(layer.tokens),
            *(f"{100 * part:.0f} %" for part in parts),
            format_ns(round(total)),
            *(f"{100 * (layer.speed_up(name) - 1):.1f} %" for name in FASTER),
        )
    console.print(
        f"{layers.name}, one of {int(layers.layers.value)} equal layers, {tensor} GPUs; "
        f"{loaded.name}"
    )
    console.print(table)
    layers_of = {phase: dataclasses.asdict(layer) for phase, layer in estimates.items()}
    outputs.write("t3-layer.json", layers_of)
    outputs.say_written(console)


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
    given = machine_changes(changes)
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
    outputs.write("t3-sensitivity.json", [dataclasses.asdict(row) for row in rows])
    outputs.say_written(console)


def run_t3_figures(
    *, changes: Changes, every_case: bool, outputs: Outputs, workers: int | None
) -> None:
    """Compare every published figure with ours, and list the assumptions with their sources."""
    machine = load_t3_machine(changes=machine_changes(changes))
    started = time.perf_counter()
    with show_progress("study t3") as runs:
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
