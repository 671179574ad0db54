"""``interlace sim run`` of a training step or a collective."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from interlace.cli.console import make_console, make_table
from interlace.cli.outputs import Outputs
from interlace.errors import ConfigError
from interlace.units import format_bytes, format_ns, format_number
from interlace_sim import plot, sweeps
from interlace_sim.astra import export
from interlace_sim.astra.chakra import write_traces
from interlace_sim.cli.progress import show_progress
from interlace_sim.collectives import ALGORITHMS
from interlace_sim.results import Result
from interlace_sim.scenario import FUSING, Scenario, parse_size
from interlace_sim.trace import to_perfetto
from interlace_sim.workloads.transformer import Transformer

Changes = list[str] | None
"""``KEY=VALUE`` texts of ``--set``."""

_SAY_SET = "Say --set machine.network.latency_ns=500."


def scenario(workload: str, options: Mapping[str, Any], changes: Changes) -> Scenario:
    """Make the scenario that a command line means.

    Args:
        workload: ``dlrm``, ``transformer``, ``moe``, or a collective's name.
        options: Values of the scenario's fields; a collective's ``size`` is text.
        changes: ``KEY=VALUE`` texts of ``--set``.

    Raises:
        ConfigError: a ``--set`` is not ``KEY=VALUE``, or there is no such key, or no such size.
    """
    if workload in ALGORITHMS:
        size = parse_size(options["size"])
        made = Scenario("collective", **{**options, "collective": workload, "size": size})
    else:
        made = Scenario(workload, **options)
    return made.change(_parse_changes(changes))


def machine_changes(changes: Changes) -> dict[str, Any]:
    """Return the values of a machine that ``--set`` changes, by the machine's own keys.

    Raises:
        ConfigError: a text is not ``machine.KEY=VALUE``.
    """
    values = {}
    for key, value in _parse_changes(changes).items():
        owner, _, machine_key = key.partition(".")
        if owner != "machine" or not machine_key:
            raise ConfigError(f"--set must change machine.KEY here; got {key!r}. {_SAY_SET}")
        values[machine_key] = value
    return values


def _parse_changes(changes: Changes) -> dict[str, Any]:
    pairs = {}
    for text in changes or ():
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(f"--set must be KEY=VALUE; got {text!r}. {_SAY_SET}")
        pairs[key] = sweeps.parse_value(value)
    return pairs


_ALONE = (
    "One GPU, which has nobody to send to: a node of this machine is one GPU, as its file says of "
    "no node how many it has. --nodes 8 is eight GPUs of it."
)


def _gpus(ranks: int) -> str:
    return f"{ranks} GPU" if ranks == 1 else f"{ranks} GPUs"


def run_step(
    workload: str,
    *,
    changes: Changes,
    outputs: Outputs,
    chakra: str | None = None,
    **options: Any,
) -> None:
    """Run a training step three times: unfused, its forward pass fused, and both passes fused.

    The table compares all three. Files hold the step that ``--fused`` asks for; pictures and traces
    show the unfused step as well.
    """
    requested = scenario(workload, options, changes).complete()
    # Needs nothing of the results, so files that cannot be written are refused before the runs.
    chakra_files = [] if chakra is None else _write_chakra(requested, chakra)
    started = time.perf_counter()
    with show_progress(workload) as runs:
        results: dict[str, Result] = {
            fused: dataclasses.replace(requested, fused=fused).simulate(runs.watch)
            for fused in runs.over(FUSING)
        }
    seconds = time.perf_counter() - started
    result = results[requested.fused]
    console = make_console()
    console.print(
        f"{result.name.split(', fused')[0]}: {_gpus(result.ranks)}, {result.topology}; "
        f"{result.machine}"
    )
    if result.ranks == 1:
        console.print(_ALONE, style="yellow")
    console.print(_comparison(results, requested.fused))
    console.print(_resources(results["none"], result))
    console.print(_layers(results["none"], result))
    model = requested.load_model()
    if isinstance(model, Transformer):
        console.print(_pipeline(model, requested.pipeline, results["none"], result))
    console.print(_critical(result))
    events = sum(run.events for run in results.values())
    console.print(
        f"{events:,} events in {seconds:.2f} s ({events / seconds * 60:,.0f} a minute).",
        style="dim",
    )
    # With --fused none the requested step is the unfused one, which is shown once.
    shown = [results["none"], result] if requested.fused != "none" else [result]
    outputs.write_json(
        lambda: {
            "scenario": dataclasses.asdict(requested),
            "result": result.to_json(),
            "layers": {
                fused: {
                    name: {"compute_ns": computed, "exposed_ns": exposed}
                    for name, (computed, exposed) in run.layers().items()
                }
                for fused, run in results.items()
            },
            "comparison": {fused: _summary(run, results["none"]) for fused, run in results.items()},
        }
    )
    outputs.write_csv(result.to_csv)
    outputs.write_plot(lambda file: plot.timeline(shown, file))
    titled = [
        (f"fused: {fused}" if fused != "none" else "unfused", run) for fused, run in results.items()
    ]
    outputs.write_plot(lambda file: plot.bars(titled, file), "-bars")
    if plot.has_layers(result):
        outputs.write_plot(lambda file: plot.layer(shown, file), "-layer")
    outputs.write_trace(lambda: to_perfetto(shown))
    if chakra_files:
        console.print(f"Written: {chakra_files[0]}, one file for each rank")
    outputs.say_written(console)


def _summary(result: Result, unfused: Result) -> dict[str, Any]:
    return {
        "total_ns": result.total_ns,
        "exposed_ns": result.exposed_ns,
        "bound_ns": round(result.bound.time_ns),
        "bound_reason": result.bound.reason,
        "saved_percent": _saved(result, unfused),
    }


def _saved(result: Result, unfused: Result) -> float:
    return 100 * (1 - result.total_ns / unfused.total_ns) if unfused.total_ns else 0.0


def _comparison(results: Mapping[str, Result], requested: str) -> Table:
    headings = ("fused", "step", "saved", "exposed", "physical bound", "bound by")
    table = make_table(*headings, left=("fused", "bound by"))
    for fused, result in results.items():
        cells = [
            fused,
            format_ns(result.total_ns),
            f"{_saved(result, results['none']):.1f} %",
            format_ns(result.exposed_ns),
            format_ns(result.bound.time_ns),
            result.bound.reason,
        ]
        table.add_row(*cells, style="bold" if fused == requested else None)
    return table


def _resources(unfused: Result, result: Result) -> Table:
    both = (unfused, result)
    table = make_table(
        "resource of a rank", "busy, unfused", "busy, fused", "bytes, unfused", "bytes, fused"
    )
    for resource in dict.fromkeys([*unfused.busy_ns, *result.busy_ns]):
        row = []
        for run in both:
            busy = run.busy_ns.get(resource, 0)
            row.append(f"{format_ns(busy)} ({100 * busy / max(1, run.total_ns):.0f} %)")
        for run in both:
            moved = run.memory_bytes if resource == "memory" else run.sent_bytes.get(resource)
            row.append("" if moved is None else format_bytes(moved))
        table.add_row(resource, *row)
    for traffic in dict.fromkeys([*unfused.traffic_bytes, *result.traffic_bytes]):
        cells = [format_bytes(run.traffic_bytes.get(traffic, 0)) for run in both]
        table.add_row(f"{traffic}, leaving", "", "", *cells)
    return table


def _layers(unfused: Result, result: Result) -> Table:
    """Make the table of layers; neighbours with equal figures share a line."""
    table = make_table(
        "layer", "compute, unfused", "exposed, unfused", "compute, fused", "exposed, fused"
    )
    lines: list[tuple[list[str], list[str]]] = []
    before, after = unfused.layers(), result.layers()
    for name in dict.fromkeys([*before, *after]):
        times = (*before.get(name, (0, 0)), *after.get(name, (0, 0)))
        cells = [format_ns(time_ns) for time_ns in times]
        if lines and lines[-1][1] == cells:
            lines[-1][0].append(name)
        else:
            lines.append(([name], cells))
    for names, cells in lines:
        # Of 40 equal layers the first and the last say it, and how many they are.
        suffix = f" ({len(names)}, each)" if len(names) > 1 else ""
        table.add_row(" to ".join(dict.fromkeys([names[0], names[-1]])) + suffix, *cells)
    return table


def _pipeline(model: Transformer, stages: int, unfused: Result, result: Result) -> str:
    """Say the depth and the microbatches, which no option need have named, and what they cost."""
    shares = [
        f"{format_ns(run.added_ns)} ({100 * run.added_ns / run.total_ns:.0f} % of the step)"
        for run in (unfused, result)
    ]
    return (
        f"Pipeline of {stages} stages (--pipeline), {model.microbatches.value:g} microbatches a "
        f"step (--set model.microbatches=N): bubble {shares[0]} unfused, {shares[1]} fused."
    )


def _critical(result: Result) -> str:
    """Describe the critical path in one line; short neighbours of a row are merged."""
    parts: list[tuple[str, str, str, int]] = []  # row, first, last, time
    for task in result.critical_path():
        time_ns = task.end_ns - task.start_ns
        # A workload of many layers has hundreds of short tasks on its path, which as one entry per
        # row leave the line readable.
        short = time_ns < 0.03 * result.total_ns
        if parts and parts[-1][0] == f"{task.row} short" and short:
            _, first, _, before = parts[-1]
            parts[-1] = (f"{task.row} short", first, task.name, before + time_ns)
        else:
            parts.append(
                (f"{task.row} short" if short else task.row, task.name, task.name, time_ns)
            )
    shown = [
        f"{first if first == last else f'{first} ... {last}'} {format_ns(time_ns)}"
        for _, first, last, time_ns in parts
        if time_ns >= 0.01 * result.total_ns
    ]
    # Six entries from the start and three from the end fit into two lines of a terminal.
    if len(shown) > 10:
        shown = [*shown[:6], f"({len(shown) - 9} more)", *shown[-3:]]
    return "Critical path: " + " -> ".join(shown)


def _write_chakra(requested: Scenario, prefix: str) -> list[Path]:
    """Write the unfused step as a Chakra trace for every rank; return the files."""
    # ASTRA-sim has no fused kernels, so the unfused step is exported whatever --fused says.
    step = dataclasses.replace(requested, fused="none").step()
    graph = export.to_graph(step.tasks, requested.load_machine())
    return write_traces([graph] * step.topology.ranks, prefix)


def run_collective(
    kind: str,
    *,
    algorithm: str | None,
    changes: Changes,
    outputs: Outputs,
    **options: Any,
) -> None:
    """Run one collective by one algorithm, or by every algorithm that fits the network."""
    base = scenario(kind, options, changes)
    results: dict[str, Result] = {}
    skipped: dict[str, str] = {}
    with show_progress(kind) as runs:
        for name in runs.over([algorithm] if algorithm else ALGORITHMS[kind]):
            try:
                results[name] = base.change({"algorithm": name}).simulate(runs.watch)
            # Without --algorithm, algorithms that do not fit the network are listed as skipped.
            except ConfigError as error:
                if algorithm:
                    raise
                skipped[name] = str(error)
    console = make_console()
    # A network that no algorithm fits is an error, and the first reason is shown.
    first = next(iter(results.values()), None)
    if first is None:
        raise ConfigError(next(iter(skipped.values())))
    console.print(
        f"{kind}, {format_bytes(base.size)} a rank: {_gpus(first.ranks)}, {first.topology}; "
        f"{first.machine}"
    )
    if first.ranks == 1:
        console.print(_ALONE, style="yellow")
    table = make_table(
        "algorithm", "time", "buffer / time", "physical bound", "over the bound", "messages' links"
    )
    for name, result in results.items():
        rate = f"{format_number(base.size / max(1, result.total_ns), 4)} GB/s"
        ratio = f"{result.total_ns / result.bound.time_ns:.2f}x" if result.bound.time_ns else ""
        links = format_bytes(sum(result.sent_bytes.values()))
        table.add_row(
            name, format_ns(result.total_ns), rate, format_ns(result.bound.time_ns), ratio, links
        )
    console.print(table)
    console.print(f"Bound by {first.bound.reason}.")
    for name, reason in skipped.items():
        console.print(f"{name} was not run: {reason}", style="dim")
    outputs.write_json(
        lambda: {
            "scenario": dataclasses.asdict(base.complete()),
            "results": {name: result.to_json() for name, result in results.items()},
        }
    )
    outputs.write_plot(lambda file: plot.timeline(list(results.values()), file))
    outputs.write_trace(lambda: to_perfetto(list(results.values())))
    outputs.say_written(console)
