"""What ``interlace sim t3`` and ``interlace sim reproduce t3`` do: run, print tables, write files."""

from __future__ import annotations

import re
import time
from pathlib import Path

from rich.table import Table

from interlace.cli.console import make_console, write_json
from interlace.cli.sim_run import make_folder, say_written
from interlace.errors import ConfigError
from interlace.sim import sweeps
from interlace.sim.t3 import CONFIGURATIONS, Product, SubLayer, load_t3_machine, load_t3_model, simulate
from interlace.sim.t3.outputs import draw, trace
from interlace.sim.t3.reproduce import Figure, study
from interlace.units import format_bytes, format_ns

SHOWN = ("sequential", "t3", "t3-mca")
"""In pictures and traces: what takes place, not bounds made of it."""


def run_t3(
    model: str,
    ranks: int,
    sublayer: str,
    shape: str | None,
    machine_name: str,
    changes: list[str] | None,
    json_file: Path | None,
    plot_file: Path | None,
    trace_file: Path | None,
) -> None:
    """One sub-layer by every configuration."""
    pairs = {}
    for text in changes or ():
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(f"--set must be KEY=VALUE; got {text!r}. Say --set tracker.sets=64.")
        pairs[key] = sweeps.parse_value(value)
    machine = load_t3_machine(machine_name, pairs)
    product = _shape(shape) if shape else load_t3_model(model).product(sublayer, ranks)
    started = time.perf_counter()
    results = {name: simulate(machine, product, ranks, name) for name in CONFIGURATIONS}
    seconds = time.perf_counter() - started
    console = make_console()
    console.print(f"{product.name}: [{product.rows}, {product.depth}] x [{product.depth}, {product.columns}] fp16, {ranks} GPUs")
    console.print(f"{machine.name}")
    console.print(_times(results))
    console.print(_traffic(results))
    fused = results["t3-mca"].parts[0]
    console.print(
        f"T3-MCA: threshold {fused.threshold:g} entries of a DRAM queue, "
        f"longest wait of communication {format_ns(fused.waited_ns)}; "
        f"tracker: at most {fused.tracker_entries} blocks at once, {fused.tracker_overflows} counted in DRAM."
    )
    console.print(f"{sum(result.result.events for result in results.values()):,} events in {seconds:.1f} s.", style="dim")
    shown = [results[name] for name in SHOWN]
    if json_file is not None:
        write_json(json_file, {name: result.to_json() for name, result in results.items()})
    if plot_file is not None:
        draw(shown, plot_file)
    if trace_file is not None:
        write_json(trace_file, trace(shown))
    say_written(console, json_file, plot_file, trace_file)


def _shape(text: str) -> Product:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if not found:
        raise ConfigError(f"--shape must be ROWSxCOLUMNSxDEPTH; got {text!r}. Say 8192x4256x2128.")
    rows, columns, depth = map(int, found.groups())
    return Product(f"product {text}", rows, columns, depth)


def _times(results: dict[str, SubLayer]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("configuration", "time", "faster", "product ends", "exposed", "bound", "bound by"):
        table.add_column(name, justify="left" if name in ("configuration", "bound by") else "right")
    base = results["sequential"].total_ns
    for name, one in results.items():
        result = one.result
        table.add_row(
            name,
            format_ns(result.total_ns),
            f"{base / result.total_ns:.3f}x",
            format_ns(one.parts[0].product_ns),
            format_ns(result.exposed_ns),
            format_ns(result.bound.time_ns),
            result.bound.reason,
        )
    return table


def _traffic(results: dict[str, SubLayer]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("DRAM traffic")
    shown = [results[name] for name in SHOWN]
    for name in SHOWN:
        table.add_column(name, justify="right")
    for key in sorted({key for one in shown for key in one.memory_bytes}):
        table.add_row(" ".join(key), *(format_bytes(one.memory_bytes.get(key, 0.0)) for one in shown))
    table.add_row("all", *(format_bytes(one.result.memory_bytes) for one in shown), style="bold")
    return table


def run_reproduce(out: Path) -> None:
    """Published and ours, the difference, whether it lies in the tolerance, and the assumptions."""
    started = time.perf_counter()
    done = study()
    console = make_console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("figure", "published", "ours", "difference", "tolerance", "", "note"):
        table.add_column(name, justify="left" if name in ("figure", "", "note") else "right")
    for one in done.figures:
        table.add_row(one.name, *_cells(one), "met" if one.met else "NOT MET", one.note, style=None if one.met else "bold")
    console.print(table)
    console.print(f"{sum(one.met for one in done.figures)} of {len(done.figures)} figures within tolerance.\n")
    assumed = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("assumption", "value", "confidence", "source"):
        assumed.add_column(name, overflow="fold")
    for key, value, confidence, source in done.assumptions:
        assumed.add_row(key, f"{value:g}" if isinstance(value, float) else ", ".join(f"{v:g}" for v in value), confidence, source)
    console.print(assumed)
    console.print(f"{time.perf_counter() - started:.1f} s.", style="dim")
    make_folder(out)
    write_json(out / "t3.json", done.to_json())
    say_written(console, out / "t3.json")


def _cells(one: Figure) -> tuple[str, str, str, str]:
    digits = 2 if one.unit == "x" else 1
    unit = "x" if one.unit == "x" else f" {one.unit}"
    return (
        f"{one.published:g}{unit}",
        f"{one.ours:.{digits}f}{unit}",
        f"{one.difference:+.{digits}f}",
        f"{one.tolerance:g}",
    )
