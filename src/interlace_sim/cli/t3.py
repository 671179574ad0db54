"""``interlace sim run t3``: one sub-layer in every configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from interlace.cli.console import make_console, make_table
from interlace.cli.outputs import Outputs
from interlace.errors import ConfigError
from interlace.units import format_bytes, format_ns, parse_count, shortened
from interlace_sim.cli.progress import show_progress
from interlace_sim.cli.run import Changes, machine_changes
from interlace_sim.t3 import (
    CONFIGURATIONS,
    Product,
    SubLayer,
    T3Machine,
    load_t3_machine,
    load_t3_model,
    simulate,
)
from interlace_sim.t3.gpu import Part
from interlace_sim.t3.outputs import SPENT, draw, trace

SHOWN = ("sequential", "t3", "t3-mca")
"""Configurations in pictures and traces: those that take place, not bounds on them."""
BOUNDS = ("ideal", "ideal-nmc")
"""Configurations that bound the others: in tables and bars, without traffic of their own."""


def run_t3(
    *,
    model: str,
    tensor: int,
    sublayer: str,
    shape: str | None,
    tokens: int | None,
    collective: str,
    topology: str | None,
    slowest: float | None,
    machine: str,
    changes: Changes,
    outputs: Outputs,
) -> None:
    """Simulate one sub-layer in every configuration; print tables and write files."""
    loaded = load_t3_machine(machine, machine_changes(changes))
    product = (
        parse_shape(shape) if shape else load_t3_model(model).product(sublayer, tensor, tokens)
    )
    # A slow GPU breaks the symmetry that lets one GPU stand for all, so all are simulated.
    slowness = None if slowest is None else (slowest, *[1.0] * (tensor - 1))
    started = time.perf_counter()
    with show_progress("t3") as runs:
        results = {
            name: simulate(
                loaded,
                product,
                tensor,
                name,
                collective,  # type: ignore[arg-type]
                network=topology,  # type: ignore[arg-type]
                slowness=slowness,
            )
            for name in runs.over(CONFIGURATIONS)
        }
    seconds = time.perf_counter() - started
    console = make_console()
    print_product(console, product, tensor, loaded, results["t3"].result.topology)
    console.print(_times(results))
    console.print(_spent(results))
    console.print(_traffic(results))
    console.print(_occupancy(results))
    console.print(
        f"{sum(result.result.events for result in results.values()):,} events in {seconds:.1f} s.",
        style="dim",
    )
    # Bounds have no events of their own: a bar in the picture, and no trace.
    shown, bounds = ([results[name] for name in names] for names in (SHOWN, BOUNDS))
    outputs.write_json(lambda: {name: result.to_json() for name, result in results.items()})
    outputs.write_plot(lambda file: draw(shown, bounds, file))
    outputs.write_trace(lambda: trace(shown))
    outputs.say_written(console)


def print_product(
    console: Console, product: Product, ranks: int, machine: T3Machine, network: str
) -> None:
    """Print one line for the product and one for the machine."""
    console.print(
        f"{product.name}: [{product.rows}, {product.depth}] x [{product.depth}, "
        f"{product.columns}] fp16, {ranks} GPUs"
    )
    console.print(f"{machine.name}; {network}")


def parse_shape(text: str) -> Product:
    """Parse ``ROWSxCOLUMNSxDEPTH``.

    Raises:
        ConfigError: the text does not have that form.
    """
    sizes = [size for part in text.split("x") if (size := parse_count(part)) is not None]
    if len(sizes) != 3 or text.count("x") != 2:
        raise ConfigError(
            f"--shape must be ROWSxCOLUMNSxDEPTH; got {shortened(text)}. Say 8192x4256x2128."
        )
    return Product(f"product {text}", *sizes)


def _times(results: dict[str, SubLayer]) -> Table:
    table = make_table(
        "configuration",
        "time",
        "faster",
        "product",
        "exposed",
        "links busy under it",
        "bound",
        "bound by",
        left=("configuration", "bound by"),
    )
    base = results["sequential"].total_ns
    for name, sublayer in results.items():
        result = sublayer.result
        table.add_row(
            name,
            format_ns(result.total_ns),
            f"{base / result.total_ns:.3f}x",
            format_ns(sublayer.fused.product_ns),
            format_ns(result.exposed_ns),
            format_ns(sublayer.overlapped_ns),
            format_ns(result.bound.time_ns),
            result.bound.reason,
        )
    return table


def _spent(results: dict[str, SubLayer]) -> Table:
    """Make the table of what the time is spent on; causes that nobody meets are left out."""
    names = (*SHOWN, *BOUNDS)
    table = make_table("where the time goes", *names)
    for cause, (meaning, _) in SPENT.items():
        times = [results[name].spent_ns.get(cause, 0.0) for name in names]
        if max(times) >= 1:
            table.add_row(meaning, *(format_ns(round(time)) for time in times))
    table.add_row("all", *(format_ns(results[name].total_ns) for name in names), style="bold")
    return table


def _traffic(results: dict[str, SubLayer]) -> Table:
    table = make_table("DRAM traffic", *SHOWN)
    shown = [results[name] for name in SHOWN]
    for key in sorted({key for sublayer in shown for key in sublayer.memory_bytes}):
        table.add_row(
            " ".join(key),
            *(format_bytes(sublayer.memory_bytes.get(key, 0.0)) for sublayer in shown),
        )
    totals = (format_bytes(sublayer.result.memory_bytes) for sublayer in shown)
    table.add_row("all", *totals, style="bold")
    return table


def _occupancy(results: dict[str, SubLayer]) -> Table:
    """Make the table of the part with the product: memory queue and tracker."""
    table = make_table("while the product runs", *SHOWN)
    rows: dict[str, Callable[[Part], str]] = {
        "DRAM queue, mean of a channel's entries": lambda part: f"{part.mean_queue_entries:.1f}",
        "DRAM accesses that open a row": lambda part: f"{100 * part.row_misses:.0f} %",
        "DRAM bus busy": lambda part: f"{100 * part.memory_busy_ns / part.time_ns:.0f} %",
        "longest wait of communication": lambda part: format_ns(part.waited_ns),
        "threshold": lambda part: _threshold(part.threshold),
        "tracker: blocks at once": lambda part: str(part.tracker_entries),
        "tracker: blocks counted in DRAM": lambda part: str(part.tracker_overflows),
    }
    # Rows are functions of a part, so that a new row is one line.
    for name, show in rows.items():
        table.add_row(name, *(show(results[shown].fused) for shown in SHOWN))
    return table


def _threshold(entries: float | None) -> str:
    """Return a threshold as text: empty without an arbiter, ``none`` if it is infinite."""
    if entries is None:
        return ""
    return "none" if math.isinf(entries) else f"{entries:g} entries"
