"""``interlace sim study``: the studies by name, of SC24's figure and of T3."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from interlace.cache_folder import cache_folder
from interlace.cli.console import make_console, make_table
from interlace.cli.outputs import Outputs
from interlace.units import format_ns
from interlace_sim import plot, reproduce
from interlace_sim.cli.progress import show_progress
from interlace_sim.cli.run import Changes, machine_changes
from interlace_sim.cli.t3 import parse_shape, print_product
from interlace_sim.t3 import estimate, load_t3_machine, load_t3_model
from interlace_sim.t3 import reproduce as t3_reproduce
from interlace_sim.t3.endtoend import REDUCED
from interlace_sim.t3.outputs import draw_figures
from interlace_sim.t3.sensitivity import sensitivity

FASTER = ("t3", "t3-mca", "ideal")
"""Configurations whose speed-ups a layer's table shows."""


def run_sc24(*, outputs: Outputs, workers: int | None, cache: Path | None, no_cache: bool) -> None:
    """Compare the paper's 21 % with ours over baselines, networks, assumptions and node counts."""
    started = time.perf_counter()
    folder = None if no_cache else cache or cache_folder("sim")
    with show_progress("study sc24") as runs:
        study = reproduce.sc24(workers=workers, cache_folder=folder, progress=runs)
    console = make_console()
    console.print(
        "DLRM training on 128 GPUs, time saved by embedding + All-to-All fused (forward), and the "
        "gradients' exchange as well (both)."
    )
    console.print(f"Paper (SC24, ASTRA-sim, 128 nodes): up to {reproduce.PAPER_PERCENT:g} %.")
    console.print(
        f"Ours, presets as they are: {study.base.forward:.1f} % forward, {study.base.both:.1f} % "
        f"both, of {study.base.unfused_ms:.1f} ms.\n"
    )
    headings = ("unfused All-to-All", "unfused step", "forward", "both")
    table = make_table("network", *headings, left=("network", headings[0]))
    for network, algorithm, saving in study.table:
        table.add_row(network, algorithm, *_saving_cells(saving))
    console.print(table)
    console.print()
    for algorithm, base in study.bases.items():
        console.print(
            f"Against {algorithm}: {base.forward:.1f} % forward, {base.both:.1f} % both; one "
            "assumption changed at a time:"
        )
        table = make_table("assumption", "forward", "both", no_wrap=True)
        for baseline, name, first, second, low, high in study.assumptions:
            if baseline == algorithm:
                forward, both = (
                    f"{low.forward:.1f} to {high.forward:.1f} %",
                    f"{low.both:.1f} to {high.both:.1f} %",
                )
                table.add_row(f"{name}: {first} to {second}", forward, both)
        console.print(table)
        console.print()
    table = make_table("nodes", *headings, left=())
    for nodes, algorithm, saving in study.curve:
        table.add_row(str(nodes), algorithm, *_saving_cells(saving))
    console.print(table)
    # The range says more than the single figure: the paper does not state all of its assumptions.
    lowest, highest = study.spread(lambda saving: saving.forward)
    low_both, high_both = study.spread(lambda saving: saving.both)
    console.print(
        f"\nRange: {lowest:.1f} to {highest:.1f} % forward, {low_both:.1f} to {high_both:.1f} % "
        f"both; the paper's {reproduce.PAPER_PERCENT:g} % lies "
        f"{'inside' if lowest <= reproduce.PAPER_PERCENT <= highest else 'OUTSIDE'}. Within 1.5 "
        "points of it:"
    )
    for network, algorithm, name, percent in study.matches():
        console.print(f"  {network}, {algorithm}, {name} fused: {percent:.1f} %")
    console.print(f"{time.perf_counter() - started:.1f} s.", style="dim")
    outputs.write("sc24.json", study.to_json())
    draw_sc24(study, outputs)
    outputs.say_written(console)


def _saving_cells(saving: reproduce.Saving) -> tuple[str, str, str]:
    return f"{saving.unfused_ms:.1f} ms", f"{saving.forward:.1f} %", f"{saving.both:.1f} %"


def draw_sc24(study: reproduce.Study, outputs: Outputs) -> None:
    """Draw the tornado of the assumptions, the curve over nodes, and the savings by network."""
    for baseline, passes, file in (
        ("one_shot", "forward", "sc24-tornado.png"),
        ("per_dimension", "forward", "sc24-tornado-per_dimension.png"),
        ("one_shot", "both", "sc24-tornado-both.png"),
    ):
        rows = [
            (name, getattr(low, passes), getattr(high, passes), first, second)
            for algorithm, name, first, second, low, high in study.assumptions
            if algorithm == baseline
        ]
        title = "forward pass" if passes == "forward" else "both passes"
        draw = functools.partial(
            plot.tornado,
            rows,
            getattr(study.bases[baseline], passes),
            reproduce.PAPER_PERCENT,
            (
                f"DLRM on 128 GPUs, {title} fused, against {baseline}: what each assumption does, "
                "the others as in the presets"
            ),
            "time of a step saved, %",
        )
        # The picture's file is the drawing function's last argument throughout.
        outputs.write(file, draw)
    nodes = list(dict.fromkeys(row[0] for row in study.curve))
    lines = []
    for algorithm in dict.fromkeys(row[1] for row in study.curve):
        selected = [saving for _, name, saving in study.curve if name == algorithm]
        lines += [
            (f"forward, against {algorithm}", [s.forward for s in selected]),
            (f"both, against {algorithm}", [s.both for s in selected]),
        ]
    draw = functools.partial(
        plot.curve,
        nodes,
        lines,
        [("paper: 21 %, 128 nodes", reproduce.PAPER_PERCENT)],
        "DLRM on a 2-D torus, the same samples a GPU: what fusing saves",
        ("nodes of one GPU", "time of a step saved, %"),
    )
    outputs.write("sc24-nodes.png", draw)
    networks = list(dict.fromkeys(row[0] for row in study.table))
    savings = {(network, algorithm): saving for network, algorithm, saving in study.table}
    draw = functools.partial(
        plot.heat_map,
        networks,
        list(reproduce.ALGORITHMS),
        [[savings[n, a].forward for a in reproduce.ALGORITHMS] for n in networks],
        "DLRM on 128 GPUs, forward pass fused: % saved",
        ("network", "unfused All-to-All"),
    )
    outputs.write("sc24-networks.png", draw)


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
        done = t3_reproduce.study(machine, every_case=every_case, workers=workers, progress=runs)
    console = make_console()
    headings = ("figure", "published", "ours", "difference", "tolerance", "met", "note")
    table = make_table(*headings, left=("figure", "note"))
    for figure in done.figures:
        table.add_row(
            figure.name,
            *_t3_cells(figure),
            "yes" if figure.met else "NO",
            figure.note,
            style=None if figure.met else "bold",
        )
    console.print(table)
    console.print(
        f"{sum(figure.met for figure in done.figures)} of {len(done.figures)} figures within "
        "tolerance.\n"
    )
    console.print(_t3_assumptions(done))
    console.print(f"{time.perf_counter() - started:.1f} s.", style="dim")
    outputs.write("t3.json", done.to_json())
    outputs.write("t3.png", lambda file: draw_figures(done.figures, file))
    outputs.say_written(console)


def _t3_assumptions(done: t3_reproduce.Study) -> Table:
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


def _t3_cells(figure: t3_reproduce.Figure) -> tuple[str, str, str, str]:
    # Ratios need two digits where percentages need one.
    digits = 2 if figure.unit == "x" else 1
    unit = "x" if figure.unit == "x" else f" {figure.unit}"
    return (
        f"{figure.published:g}{unit}",
        f"{figure.ours:.{digits}f}{unit}",
        f"{figure.difference:+.{digits}f}",
        f"{figure.tolerance:g}",
    )


STUDIES: dict[str, Callable[..., None]] = {
    "sc24": run_sc24,
    "t3": run_t3_figures,
    "t3-layer": run_layer,
    "t3-sensitivity": run_sensitivity,
}
"""The function that runs each study; it takes the study's options and its files."""
