"""``interlace sim study``: the studies by name, and the one of SC24's figure."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

from interlace.cache_folder import cache_folder
from interlace.cli.console import make_console
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table
from interlace_sim import plot, reproduce
from interlace_sim.cli.progress import show_progress
from interlace_sim.cli.t3_studies import run_layer, run_sensitivity, run_t3_figures


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


STUDIES: dict[str, Callable[..., None]] = {
    "sc24": run_sc24,
    "t3": run_t3_figures,
    "t3-layer": run_layer,
    "t3-sensitivity": run_sensitivity,
}
"""The function that runs each study; it takes the study's options and its files."""
