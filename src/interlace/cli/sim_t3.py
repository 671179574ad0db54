"""What ``interlace sim t3`` and ``interlace sim reproduce t3`` do: run, print tables, write files."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from interlace.cli.console import make_console, write_json
from interlace.cli.sim_run import make_folder, say_written
from interlace.errors import ConfigError
from interlace.sim import sweeps
from interlace.sim.t3 import (
    CONFIGURATIONS,
    Product,
    SubLayer,
    T3Machine,
    estimate,
    load_t3_machine,
    load_t3_model,
    simulate,
)
from interlace.sim.t3.endtoend import REDUCED
from interlace.sim.t3.gpu import Part
from interlace.sim.t3.measured import compare
from interlace.sim.t3.outputs import draw, draw_figures, draw_measured, trace
from interlace.sim.t3.reproduce import Figure, Study, study
from interlace.sim.t3.sensitivity import sensitivity
from interlace.units import format_bytes, format_ns

SHOWN = ("sequential", "t3", "t3-mca")
"""In pictures and traces: what takes place, not bounds made of it."""
FASTER = ("t3", "t3-mca", "ideal")


def run_t3(
    model: str,
    ranks: int,
    sublayer: str,
    shape: str | None,
    tokens: int | None,
    collective: str,
    network: str | None,
    slowest: float | None,
    machine_name: str,
    changes: list[str] | None,
    json_file: Path | None,
    plot_file: Path | None,
    trace_file: Path | None,
) -> None:
    """One sub-layer by every configuration."""
    machine = load_t3_machine(machine_name, parse_changes(changes))
    product = parse_shape(shape) if shape else load_t3_model(model).product(sublayer, ranks, tokens)
    slowness = None if slowest is None else (slowest, *[1.0] * (ranks - 1))
    started = time.perf_counter()
    results = {
        name: simulate(
            machine,
            product,
            ranks,
            name,
            collective,  # type: ignore[arg-type]
            network=network,  # type: ignore[arg-type]
            slowness=slowness,
        )
        for name in CONFIGURATIONS
    }
    seconds = time.perf_counter() - started
    console = make_console()
    say_what(console, product, ranks, machine, results["t3"].result.topology)
    console.print(_times(results))
    console.print(_traffic(results))
    console.print(_occupancy(results))
    console.print(
        f"{sum(result.result.events for result in results.values()):,} events in {seconds:.1f} s.",
        style="dim",
    )
    shown = [results[name] for name in SHOWN]
    if json_file is not None:
        write_json(json_file, {name: result.to_json() for name, result in results.items()})
    if plot_file is not None:
        draw(shown, plot_file)
    if trace_file is not None:
        write_json(trace_file, trace(shown))
    say_written(console, json_file, plot_file, trace_file)


def run_sensitivity(
    model: str,
    ranks: int,
    sublayer: str,
    shape: str | None,
    machine_name: str,
    changes: list[str] | None,
    json_file: Path | None,
) -> None:
    """One sub-layer, with each assumption changed in turn."""
    given = parse_changes(changes)
    product = parse_shape(shape) if shape else load_t3_model(model).product(sublayer, ranks)
    machine = load_t3_machine(machine_name, given)
    rows = sensitivity(machine_name, given, product, ranks)
    console = make_console()
    say_what(console, product, ranks, machine, machine.network.topology)
    table = _table("value", "changed to", *(f"{name}, faster" for name in rows[0].speed_ups))
    for row in rows:
        gains = (f"{100 * (gain - 1):.1f} %" for gain in row.speed_ups.values())
        table.add_row(row.key, "" if row.value is None else f"{row.value:g}", *gains)
    console.print(table)
    if json_file is not None:
        write_json(json_file, [dataclasses.asdict(row) for row in rows])
    say_written(console, json_file)


def run_layer(
    model: str,
    ranks: int,
    machine_name: str,
    changes: list[str] | None,
    sequences: int,
    rest_share: float,
    json_file: Path | None,
) -> None:
    """A whole layer: training, a prompt, and the generation of tokens."""
    machine, layers = load_t3_machine(machine_name, parse_changes(changes)), load_t3_model(model)
    estimates = {
        phase: estimate(
            machine,
            layers,
            ranks,
            phase,
            tokens=sequences if phase == "generation" else None,
            rest_share=rest_share,
        )
        for phase in REDUCED
    }
    console = make_console()
    table = _table(
        "layer",
        "tokens",
        "all-reduced",
        "other products",
        "not sliced",
        "sequential",
        *(f"{name}, faster" for name in FASTER),
    )
    for phase, layer in estimates.items():
        total = layer.layer_ns("sequential")
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
        f"{layers.name}, one of {int(layers.layers.value)} equal layers, {ranks} GPUs; "
        f"{machine.name}"
    )
    console.print(table)
    if json_file is not None:
        write_json(
            json_file, {phase: dataclasses.asdict(layer) for phase, layer in estimates.items()}
        )
    say_written(console, json_file)


def run_measured(
    files: list[Path],
    machine_name: str,
    changes: list[str] | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """T3 against measured software, shape by shape."""
    machine = load_t3_machine(machine_name, parse_changes(changes))
    found, left_out = compare(machine, files)
    console = make_console()
    console.print(f"{machine.name}; measured: {', '.join(file.name for file in files)}")
    table = _table(
        "operator",
        "shape",
        "unfused",
        "modelled",
        "error",
        "ours",
        "which",
        "T3",
        "T3 faster",
        "ideal overlap",
        "floor",
    )
    for one in found:
        table.add_row(
            one.operator,
            one.product.name,
            format_ns(round(one.measured_ns["unfused"])),
            format_ns(one.modelled_ns["sequential"]),
            f"{100 * one.error:+.1f} %",
            format_ns(round(one.software_ns)),
            one.software,
            format_ns(round(one.corrected_ns("t3-mca"))),
            f"{one.gain:.2f}x",
            format_ns(round(one.corrected_ns("ideal"))),
            format_ns(round(one.floor_ns)),
        )
    console.print(table)
    if left_out:
        console.print(f"Left out, with fewer tiles than compute units: {', '.join(left_out)}.")
    if json_file is not None:
        write_json(
            json_file,
            [
                {
                    **dataclasses.asdict(one),
                    "error": one.error,
                    "software": one.software,
                    "gain": one.gain,
                }
                for one in found
            ],
        )
    if plot_file is not None:
        draw_measured(found, plot_file)
    say_written(console, json_file, plot_file)


def parse_changes(changes: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` texts as a mapping."""
    pairs = {}
    for text in changes or ():
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(f"--set must be KEY=VALUE; got {text!r}. Say --set tracker.sets=64.")
        pairs[key] = sweeps.parse_value(value)
    return pairs


def say_what(
    console: Console, product: Product, ranks: int, machine: T3Machine, network: str
) -> None:
    """The product and the machine, in a line each."""
    console.print(
        f"{product.name}: [{product.rows}, {product.depth}] x [{product.depth}, "
        f"{product.columns}] fp16, {ranks} GPUs"
    )
    console.print(f"{machine.name}; {network}")


def parse_shape(text: str) -> Product:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if not found:
        raise ConfigError(f"--shape must be ROWSxCOLUMNSxDEPTH; got {text!r}. Say 8192x4256x2128.")
    rows, columns, depth = map(int, found.groups())
    return Product(f"product {text}", rows, columns, depth)


def _table(*columns: str, left: str = "") -> Table:
    """The first column to the left, the others to the right, but for the one that is called
    ``left`` and comes last.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    if left:
        table.add_column(left)
    return table


def _times(results: dict[str, SubLayer]) -> Table:
    table = _table(
        "configuration",
        "time",
        "faster",
        "product",
        "exposed",
        "links busy under it",
        "bound",
        left="bound by",
    )
    base = results["sequential"].total_ns
    for name, one in results.items():
        result = one.result
        table.add_row(
            name,
            format_ns(result.total_ns),
            f"{base / result.total_ns:.3f}x",
            format_ns(one.fused.product_ns),
            format_ns(result.exposed_ns),
            format_ns(one.overlapped_ns),
            format_ns(result.bound.time_ns),
            result.bound.reason,
        )
    return table


def _traffic(results: dict[str, SubLayer]) -> Table:
    table = _table("DRAM traffic", *SHOWN)
    shown = [results[name] for name in SHOWN]
    for key in sorted({key for one in shown for key in one.memory_bytes}):
        table.add_row(
            " ".join(key), *(format_bytes(one.memory_bytes.get(key, 0.0)) for one in shown)
        )
    table.add_row("all", *(format_bytes(one.result.memory_bytes) for one in shown), style="bold")
    return table


def _occupancy(results: dict[str, SubLayer]) -> Table:
    """Of the part with the product."""
    table = _table("while the product runs", *SHOWN)
    rows: dict[str, Callable[[Part], str]] = {
        "DRAM queue, mean of a channel's entries": lambda part: f"{part.mean_queue_entries:.1f}",
        "DRAM accesses that open a row": lambda part: f"{100 * part.row_misses:.0f} %",
        "DRAM bus busy": lambda part: f"{100 * part.memory_busy_ns / part.time_ns:.0f} %",
        "longest wait of communication": lambda part: format_ns(part.waited_ns),
        "threshold": lambda part: "" if part.threshold is None else f"{part.threshold:g} entries",
        "tracker: blocks at once": lambda part: str(part.tracker_entries),
        "tracker: blocks counted in DRAM": lambda part: str(part.tracker_overflows),
    }
    for name, show in rows.items():
        table.add_row(name, *(show(results[which].fused) for which in SHOWN))
    return table


def run_reproduce(out: Path, workers: int | None) -> None:
    """Published and ours, the difference, whether it lies in the tolerance, and the assumptions."""
    started = time.perf_counter()
    done = study(workers=workers)
    console = make_console()
    table = _table("figure", "published", "ours", "difference", "tolerance", "met", left="note")
    for one in done.figures:
        table.add_row(
            one.name,
            *_cells(one),
            "yes" if one.met else "NO",
            one.note,
            style=None if one.met else "bold",
        )
    console.print(table)
    console.print(
        f"{sum(one.met for one in done.figures)} of {len(done.figures)} figures within tolerance.\n"
    )
    console.print(_assumptions(done))
    console.print(f"{time.perf_counter() - started:.1f} s.", style="dim")
    make_folder(out)
    write_json(out / "t3.json", done.to_json())
    draw_figures(done.figures, out / "t3.png")
    say_written(console, out / "t3.json", out / "t3.png")


def _assumptions(done: Study) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("assumption", "value", "confidence", "source"):
        table.add_column(name, overflow="fold")
    for key, value, confidence, source in done.assumptions:
        table.add_row(
            key,
            f"{value:g}" if isinstance(value, float) else ", ".join(f"{v:g}" for v in value),
            confidence,
            source,
        )
    return table


def _cells(one: Figure) -> tuple[str, str, str, str]:
    digits = 2 if one.unit == "x" else 1
    unit = "x" if one.unit == "x" else f" {one.unit}"
    return (
        f"{one.published:g}{unit}",
        f"{one.ours:.{digits}f}{unit}",
        f"{one.difference:+.{digits}f}",
        f"{one.tolerance:g}",
    )
