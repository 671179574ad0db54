"""What ``interlace sim ...`` does: run, print tables, write files."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from interlace.cli.console import make_console, write_json
from interlace.errors import ArgumentError, ConfigError
from interlace.sim import calibrate, plot, reproduce, sweeps, validate
from interlace.sim.astra import chakra, export
from interlace.sim.astra.config import Network, System
from interlace.sim.astra.workload import run as run_graphs
from interlace.sim.collectives import ALGORITHMS
from interlace.sim.configfile import load
from interlace.sim.machine import find, load_machine, presets
from interlace.sim.results import Result
from interlace.sim.scenario import FUSING, Scenario
from interlace.sim.trace import report_to_perfetto, to_perfetto
from interlace.sim.workloads import dlrm
from interlace.sim.workloads.common import load_workload
from interlace.units import GIB, KIB, MIB, format_bytes, format_ns

Changes = list[str] | None


def scenario(kind: str, options: Mapping[str, Any], changes: Changes) -> Scenario:
    """The scenario that a command line means.

    Raises:
        ConfigError: a ``--set`` is not ``KEY=VALUE``, or there is no such key.
    """
    made = Scenario(kind, **options)
    pairs: dict[str, Any] = {}
    for text in changes or ():
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(
                f"--set must be KEY=VALUE; got {text!r}. Say --set model.tables=1024."
            )
        pairs[key] = sweeps.parse_value(value)
    return made.change(pairs)


def run_workload(
    kind: str,
    options: Mapping[str, Any],
    changes: Changes,
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
    trace_file: Path | None,
    chakra_prefix: str | None = None,
) -> None:
    """A workload with nothing, the forward pass, and both fused.

    Files are of what was asked for, beside the unfused step.
    """
    wanted = scenario(kind, options, changes).complete()
    started = time.perf_counter()
    results: dict[str, Result] = {
        fused: dataclasses.replace(wanted, fused=fused).simulate() for fused in FUSING
    }
    seconds = time.perf_counter() - started
    result = results[wanted.fused]
    console = make_console()
    console.print(
        f"{result.name.split(', fused')[0]}: {result.ranks} GPUs, {result.topology}; "
        f"{result.machine}"
    )
    console.print(_comparison(results, wanted.fused))
    console.print(_resources(results["none"], result))
    console.print(_critical(result))
    events = sum(one.events for one in results.values())
    console.print(
        f"{events:,} events in {seconds:.2f} s ({events / seconds * 60:,.0f} a minute).",
        style="dim",
    )
    shown = [results["none"], result] if wanted.fused != "none" else [result]
    if json_file is not None:
        write_json(
            json_file,
            {
                "scenario": dataclasses.asdict(wanted),
                "result": result.to_json(),
                "comparison": {
                    fused: _summary(one, results["none"]) for fused, one in results.items()
                },
            },
        )
    if csv_file is not None:
        write_text(csv_file, result.to_csv())
    if trace_file is not None:
        write_json(trace_file, to_perfetto(shown))
    if plot_file is not None:
        plot.timeline(shown, plot_file)
        bars = plot_file.with_name(f"{plot_file.stem}-bars{plot_file.suffix}")
        plot.bars(
            [
                (f"fused: {fused}" if fused != "none" else "unfused", one)
                for fused, one in results.items()
            ],
            bars,
        )
    if chakra_prefix is not None:
        _write_chakra(wanted, result.ranks, chakra_prefix)
    say_written(console, json_file, csv_file, plot_file, trace_file)


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


def _comparison(results: Mapping[str, Result], wanted: str) -> Table:
    table = Table(title=None, box=None, padding=(0, 2, 0, 0))
    for name in ("fused", "step", "saved", "exposed", "physical bound", "bound by"):
        table.add_column(name, justify="left" if name in ("fused", "bound by") else "right")
    for fused, result in results.items():
        cells = [
            fused,
            format_ns(result.total_ns),
            f"{_saved(result, results['none']):.1f} %",
            format_ns(result.exposed_ns),
            format_ns(result.bound.time_ns),
            result.bound.reason,
        ]
        table.add_row(*cells, style="bold" if fused == wanted else None)
    return table


def _resources(unfused: Result, result: Result) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("resource of a rank")
    for name in ("busy, unfused", "busy, fused", "bytes, unfused", "bytes, fused"):
        table.add_column(name, justify="right")
    for resource in dict.fromkeys([*unfused.busy_ns, *result.busy_ns]):
        row = []
        for one in (unfused, result):
            busy = one.busy_ns.get(resource, 0)
            row.append(f"{format_ns(busy)} ({100 * busy / max(1, one.total_ns):.0f} %)")
        for one in (unfused, result):
            moved = one.memory_bytes if resource == "memory" else one.sent_bytes.get(resource)
            row.append("" if moved is None else format_bytes(moved))
        table.add_row(resource, *row)
    for traffic in dict.fromkeys([*unfused.traffic_bytes, *result.traffic_bytes]):
        cells = [format_bytes(one.traffic_bytes.get(traffic, 0)) for one in (unfused, result)]
        table.add_row(f"{traffic}, leaving", "", "", *cells)
    return table


def _critical(result: Result) -> str:
    """The critical path in one line; short neighbours of a row are taken together."""
    parts: list[tuple[str, str, str, int]] = []  # row, first, last, time
    for task in result.critical_path():
        time_ns = task.end_ns - task.start_ns
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
    if len(shown) > 10:
        shown = [*shown[:6], f"({len(shown) - 9} more)", *shown[-3:]]
    return "Critical path: " + " -> ".join(shown)


def _write_chakra(wanted: Scenario, ranks: int, prefix: str) -> None:
    model = load_workload(dlrm.Dlrm, "dlrm", wanted.model, dict(wanted.model_changes))
    tasks = dlrm.tasks(
        model, ranks, all_to_all=wanted.all_to_all, all_reduce=wanted.all_reduce
    ).tasks
    graph = export.to_graph(tasks, wanted.load_machine())
    chakra.write_traces([graph] * ranks, prefix)


def write_text(file: Path, text: str) -> None:
    """Raises:
    ArgumentError: the file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"{file} must be a file that can be written; {error.strerror}."
        ) from error


def say_written(console: Any, *files: Path | None) -> None:
    written = [str(file) for file in files if file is not None]
    if written:
        console.print(f"Written: {', '.join(written)}")


def parse_size(text: str) -> int:
    """``"16MiB"`` -> 16777216; also B, kB, MB, GB (powers of ten), KiB, GiB.

    Raises:
        ArgumentError: it is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|kB|KB|MB|GB|KiB|MiB|GiB)?", text.strip())
    if not found:
        raise ArgumentError(
            f"--size must be a number of bytes; got {text!r}. Say 16MiB, or 16MB for powers of ten."
        )
    units = {
        "B": 1,
        "kB": 10**3,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "KiB": KIB,
        "MiB": MIB,
        "GiB": GIB,
    }
    return int(float(found[1]) * units[found[2] or "B"])


def run_collective(
    kind: str,
    size: str,
    algorithm: str | None,
    options: Mapping[str, Any],
    changes: Changes,
    json_file: Path | None,
    plot_file: Path | None,
    trace_file: Path | None,
) -> None:
    """One collective by one algorithm, or by all that can be run so."""
    if kind not in ALGORITHMS:
        raise ConfigError(f"a collective must be one of {', '.join(ALGORITHMS)}; got {kind!r}.")
    count = parse_size(size)
    base = scenario("collective", {**options, "collective": kind, "size": count}, changes)
    results: dict[str, Result] = {}
    skipped: dict[str, str] = {}
    for name in [algorithm] if algorithm else ALGORITHMS[kind]:
        try:
            results[name] = base.change({"algorithm": name}).simulate()
        except ConfigError as error:
            if algorithm:
                raise
            skipped[name] = str(error)
    console = make_console()
    first = next(iter(results.values()), None)
    if first is None:
        raise ConfigError(next(iter(skipped.values())))
    console.print(
        f"{kind}, {format_bytes(count)} a rank: {first.ranks} GPUs, {first.topology}; "
        f"{first.machine}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (
        "algorithm",
        "time",
        "buffer / time",
        "physical bound",
        "over the bound",
        "messages' links",
    ):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for name, result in results.items():
        rate = f"{count / max(1, result.total_ns):.4g} GB/s"
        over = f"{result.total_ns / result.bound.time_ns:.2f}x" if result.bound.time_ns else ""
        links = format_bytes(sum(result.sent_bytes.values()))
        table.add_row(
            name, format_ns(result.total_ns), rate, format_ns(result.bound.time_ns), over, links
        )
    console.print(table)
    console.print(f"Bound by {first.bound.reason}.")
    for name, why in skipped.items():
        console.print(f"{name} was not run: {why}", style="dim")
    if json_file is not None:
        write_json(
            json_file,
            {
                "scenario": dataclasses.asdict(base.complete()),
                "results": {n: r.to_json() for n, r in results.items()},
            },
        )
    if trace_file is not None:
        write_json(trace_file, to_perfetto(list(results.values())))
    if plot_file is not None:
        plot.timeline(list(results.values()), plot_file)
    say_written(console, json_file, plot_file, trace_file)


def run_astra(
    network: Path,
    system: Path,
    workload: str,
    groups: Path | None,
    unaware: bool,
    json_file: Path | None,
    trace_file: Path | None,
) -> None:
    """ASTRA-sim's inputs, its semantics; unphysical outcomes are flagged."""
    net, config = load(Network, network), load(System, system)
    graphs = chakra.read_traces(workload, net.npus)
    report = run_graphs(
        net,
        config,
        graphs,
        congestion_aware=not unaware,
        groups=chakra.read_groups(groups) if groups else None,
    )
    console = make_console()
    console.print(
        f"{net.npus} NPUs: last ends at {report.total_ns} ns, first at {min(report.end_ns)} ns; "
        "exposed communication "
        f"at most {max(report.exposed_ns)} ns."
    )
    console.print(f"Physical bound: {report.bound_ns:.0f} ns.")
    if report.unphysical:
        console.print(
            "UNPHYSICAL: the result lies under the bound; the congestion-unaware network lets "
            "messages share links for nothing.",
            style="bold red",
        )
    console.print(f"{report.events:,} events.", style="dim")
    if json_file is not None:
        write_json(
            json_file,
            {
                "end_ns": report.end_ns,
                "exposed_ns": report.exposed_ns,
                "bound_ns": round(report.bound_ns),
                "unphysical": report.unphysical,
                "sent_bytes": report.sent_bytes,
                "events": report.events,
                "spans": [
                    [{"node": node, "start_ns": start, "end_ns": end} for node, start, end in spans]
                    for spans in report.spans
                ],
            },
        )

    if trace_file is not None:
        write_json(trace_file, report_to_perfetto(report, graphs))
    say_written(console, json_file, trace_file)


def run_sweep(
    kind: str,
    parameters: Sequence[str],
    changes: Changes,
    value: str,
    workers: int | None,
    cache: Path | None,
    no_cache: bool,
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Every combination; a table, and a heat map over the first two parameters (the mean over the
    others).
    """
    if value not in sweeps.VALUES:
        raise ConfigError(f"--value must be one of {', '.join(sweeps.VALUES)}; got {value!r}.")
    values = dict(sweeps.parse_parameter(text) for text in parameters)
    base = scenario(kind, {"fused": "both"} if kind != "collective" else {}, changes)
    folder = None if no_cache else cache or sweeps.default_cache()
    started = time.perf_counter()
    points = sweeps.sweep(base, values, workers=workers, cache_folder=folder)
    console = make_console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in [*values, "step", "exposed", "bound", "saved"]:
        table.add_column(name, justify="right")
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
    fresh = sum(not point.cached for point in points)
    console.print(
        f"{len(points)} points, {len(points) - fresh} of them remembered; "
        f"{time.perf_counter() - started:.1f} s.",
        style="dim",
    )
    if json_file is not None:
        write_json(
            json_file,
            {
                "scenario": dataclasses.asdict(base.complete()),
                "points": [dataclasses.asdict(point) for point in points],
            },
        )
    if csv_file is not None:
        write_text(csv_file, sweeps.to_csv(points))
    if plot_file is not None:
        _heat_map(points, values, value, kind, plot_file)
    say_written(console, json_file, csv_file, plot_file)


def _heat_map(
    points: Sequence[sweeps.Point],
    values: Mapping[str, Sequence[Any]],
    value: str,
    kind: str,
    file: Path,
) -> None:
    names = list(values)
    rows, columns = names[0], names[1] if len(names) > 1 else None
    grid = []
    for row in values[rows]:
        line = []
        for column in values[columns] if columns else [None]:
            mine = [
                getattr(point, value)
                for point in points
                if not point.error
                and point.parameters[rows] == row
                and (columns is None or point.parameters[columns] == column)
            ]
            line.append(sum(mine) / len(mine) if mine else float("nan"))
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
        f"{kind}: {titles.get(value, value)}, {unit}".rstrip(", "),
        (rows, columns or ""),
        file,
    )


def _short(value: Any) -> str:
    """``25000000000.0`` -> ``"25e9"``."""
    if isinstance(value, float):
        return f"{value / 1e9:g}e9" if value >= 1e8 else f"{value:g}"
    return str(value)


def run_validate(cases_file: Path | None, out: Path, brief: bool) -> int:
    """0 if every case is within its tolerance."""
    started = time.perf_counter()
    cases = validate.validate(cases_file)
    seconds = time.perf_counter() - started
    console = make_console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("case", "quantity", "recorded", "ours", "error", ""):
        table.add_column(name, justify="left" if name in ("case", "quantity", "") else "right")
    for case in cases:
        if not brief or not case.passed or case.source == "measured":
            note = "" if case.passed else "FAILED"
            table.add_row(
                case.name,
                case.quantity,
                f"{case.theirs:.10g}",
                f"{case.ours:.10g}",
                f"{100 * case.error:+.3f} %",
                note + (" unphysical" if case.unphysical else ""),
            )
    if table.row_count:
        console.print(table)
    astra = [case for case in cases if case.source == "astra-sim"]
    passed = sum(case.passed for case in cases)
    exact = sum(case.error == 0 for case in astra)
    worst = max((abs(case.error) for case in astra), default=0.0)
    names = {case.name for case in astra}
    for case in cases:
        if case.problem:
            console.print(f"{case.name} was not run: {case.problem}")
    console.print(
        f"ASTRA-sim: {len(astra)} figures of {len(names)} runs, {exact} exact to the nanosecond, "
        f"largest error {100 * worst:.4f} %."
    )
    flagged = sorted({case.name for case in cases if case.unphysical})
    if flagged:
        console.print(
            f"{len(flagged)} recorded runs of the congestion-unaware network lie under the "
            "physical bound, and so do "
            f"ours: {', '.join(flagged)}."
        )
    events = sum({(case.name, case.events): case.events for case in cases}.values())
    console.print(
        f"{passed} of {len(cases)} figures within tolerance ({100 * validate.TOLERANCE:g} % of "
        "ASTRA-sim's, "
        f"{100 * validate.MEASURED_TOLERANCE:g} % of measured ones); "
        f"{events:,} events, {seconds:.1f} s."
    )
    make_folder(out)
    write_text(out / "validate.csv", validate.to_csv(cases))
    write_json(
        out / "validate.json",
        [
            {**dataclasses.asdict(case), "error": case.error, "passed": case.passed}
            for case in cases
        ],
    )
    groups = [
        (case.quantity.split(",")[0], case.theirs, case.ours)
        for case in astra
        if case.theirs > 0 and case.ours > 0
    ]
    plot.correlation(
        groups,
        f"ASTRA-sim and this simulator: {exact} of {len(astra)} figures equal",
        ("ASTRA-sim, ns", "ours, ns"),
        out / "validate.png",
    )
    say_written(console, out / "validate.csv", out / "validate.json", out / "validate.png")
    return 0 if passed == len(cases) else 1


def run_calibrate(
    files: Sequence[Path], out: Path, base_name: str, gpus: int | None, name: str, source: str
) -> None:
    """Fit, say how well, write the machine file."""
    products, timings = calibrate.read_measurements(files)
    timings = [timing for timing in timings if gpus is None or timing.gpus == gpus]
    base = load_machine(base_name)
    net = base.node or base.network
    fits = []
    if products:
        fits.append(
            calibrate.fit_products(
                products, base.gpu.flops_per_s.value, base.gpu.memory_bytes_per_s.value
            )
        )
    if timings:
        fits.append(calibrate.fit_collectives(timings, net.link_bytes_per_s.value))
    if not fits:
        raise ConfigError(f"there must be measurements of {gpus} GPUs; got none. Leave --gpus out.")
    console = make_console()
    for fit in fits:
        console.print(
            f"{fit.what}: fitted to {fit.points} points; on {fit.held_out} held-out points "
            f"{100 * fit.mean_error:.1f} % mean, "
            f"{100 * fit.median_error:.1f} % median, {100 * fit.worst_error:.0f} % largest error"
        )
        for key, value in fit.values.items():
            console.print(f"  {key} = {value:.4g}")
    source = source or ", ".join(file.name for file in files)
    document = calibrate.machine_document(
        base, fits, source, name, gpus or max((t.gpus for t in timings), default=1)
    )
    calibrate.write(document, out)
    console.print(f"Written: {out}")


def run_presets(name: str | None) -> None:
    """All presets, or one with the source of each value."""
    console = make_console()
    folders = ("machines", "dlrm", "transformer", "moe", "t3_machines", "t3_models")
    if name is None:
        for folder in folders:
            console.print(f"{folder}: {', '.join(presets(folder))}")
        console.print("Show one with its sources: interlace sim presets NAME", style="dim")
        return
    folder = next((candidate for candidate in folders if name in presets(candidate)), "")
    if not folder:
        raise ConfigError(
            f"a preset must be one of {', '.join(p for f in folders for p in presets(f))}; got "
            f"{name!r}."
        )
    document = yaml.safe_load(find(folder, name).read_text(encoding="utf-8"))
    table = Table(
        title=f"{folder}: {document['name']}", box=None, padding=(0, 2, 0, 0), title_justify="left"
    )
    for column in ("key", "value", "confidence", "source"):
        table.add_column(column, overflow="fold")
    for key, value in _flat(document):
        if isinstance(value, dict):
            shown = value["value"]
            if isinstance(shown, list):
                text = (
                    ", ".join(map(str, shown))
                    if len(shown) <= 4
                    else f"{len(shown)} sizes: {shown[0]} ... {shown[-1]}"
                )
            else:
                text = f"{float(shown):g}"
            table.add_row(key, text, value["confidence"], value["source"])
        elif key not in ("name", "note"):
            table.add_row(key, str(value), "", "")
    console.print(table)
    if document.get("note"):
        console.print(document["note"].strip(), style="dim")


def _flat(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in document.items():
        if isinstance(value, dict) and "value" not in value:
            out += _flat(value, f"{prefix}{key}.")
        else:
            out.append((prefix + key, value))
    return out


def run_sc24(out: Path, workers: int | None, cache: Path | None, no_cache: bool) -> None:
    """The paper's 21 % and ours, over baselines, networks and assumptions; and over node counts."""
    started = time.perf_counter()
    study = reproduce.sc24(
        workers=workers, cache_folder=None if no_cache else cache or sweeps.default_cache()
    )
    console = make_console()
    console.print(
        "DLRM training on 128 GPUs, time saved by embedding + All-to-All fused (forward), and the "
        "gradients' exchange "
        "as well (both)."
    )
    console.print(f"Paper (SC24, ASTRA-sim, 128 nodes): up to {reproduce.PAPER_PERCENT:g} %.")
    console.print(
        f"Ours, presets as they are: {study.base.forward:.1f} % forward, {study.base.both:.1f} % "
        "both, of "
        f"{study.base.unfused_ms:.1f} ms.\n"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("network", "unfused All-to-All", "unfused step", "forward", "both"):
        table.add_column(
            name, justify="left" if name in ("network", "unfused All-to-All") else "right"
        )
    for network, algorithm, saving in study.table:
        table.add_row(
            network,
            algorithm,
            f"{saving.unfused_ms:.1f} ms",
            f"{saving.forward:.1f} %",
            f"{saving.both:.1f} %",
        )
    console.print(table)
    console.print()
    for algorithm, base in study.bases.items():
        console.print(
            f"Against {algorithm}: {base.forward:.1f} % forward, {base.both:.1f} % both; one "
            "assumption changed at a time:"
        )
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("assumption", "forward", "both"):
            table.add_column(
                name, justify="left" if name == "assumption" else "right", no_wrap=True
            )
        for baseline, name, first, second, low, high in study.assumptions:
            if baseline == algorithm:
                forward, both = (
                    f"{low.forward:.1f} to {high.forward:.1f} %",
                    f"{low.both:.1f} to {high.both:.1f} %",
                )
                table.add_row(f"{name}: {first} to {second}", forward, both)
        console.print(table)
        console.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("nodes", "unfused All-to-All", "unfused step", "forward", "both"):
        table.add_column(name, justify="right")
    for nodes, algorithm, saving in study.curve:
        table.add_row(
            str(nodes),
            algorithm,
            f"{saving.unfused_ms:.1f} ms",
            f"{saving.forward:.1f} %",
            f"{saving.both:.1f} %",
        )
    console.print(table)
    least, most = study.spread(lambda saving: saving.forward)
    low_both, high_both = study.spread(lambda saving: saving.both)
    console.print(
        f"\nRange: {least:.1f} to {most:.1f} % forward, {low_both:.1f} to {high_both:.1f} % both; "
        "the paper's "
        f"{reproduce.PAPER_PERCENT:g} % lies "
        f"{'inside' if least <= reproduce.PAPER_PERCENT <= most else 'OUTSIDE'}. Within 1.5 "
        "points of it:"
    )
    for network, algorithm, name, percent in study.matches():
        console.print(f"  {network}, {algorithm}, {name} fused: {percent:.1f} %")
    console.print(f"{time.perf_counter() - started:.1f} s.", style="dim")
    make_folder(out)
    write_json(out / "sc24.json", study.to_json())
    draw_sc24(study, out)
    say_written(
        console,
        out / "sc24.json",
        out / "sc24-tornado.png",
        out / "sc24-nodes.png",
        out / "sc24-networks.png",
    )


def draw_sc24(study: reproduce.Study, out: Path) -> None:
    """Tornado of the assumptions, curve over nodes, and savings by network and All-to-All."""
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
        which = "forward pass" if passes == "forward" else "both passes"
        plot.tornado(
            rows,
            getattr(study.bases[baseline], passes),
            reproduce.PAPER_PERCENT,
            (
                f"DLRM on 128 GPUs, {which} fused, against {baseline}: what each assumption does, "
                "the others as in the presets"
            ),
            "time of a step saved, %",
            out / file,
        )
    nodes = list(dict.fromkeys(row[0] for row in study.curve))
    lines = []
    for algorithm in dict.fromkeys(row[1] for row in study.curve):
        mine = [saving for _, name, saving in study.curve if name == algorithm]
        lines += [
            (f"forward, against {algorithm}", [s.forward for s in mine]),
            (f"both, against {algorithm}", [s.both for s in mine]),
        ]
    plot.curve(
        nodes,
        lines,
        [("paper: 21 %, 128 nodes", reproduce.PAPER_PERCENT)],
        "DLRM on a 2-D torus, the same samples a GPU: what fusing saves",
        ("nodes of one GPU", "time of a step saved, %"),
        out / "sc24-nodes.png",
    )
    networks = list(dict.fromkeys(row[0] for row in study.table))
    found = {(network, algorithm): saving for network, algorithm, saving in study.table}
    plot.heat_map(
        networks,
        list(reproduce.ALGORITHMS),
        [[found[n, a].forward for a in reproduce.ALGORITHMS] for n in networks],
        "DLRM on 128 GPUs, forward pass fused: % saved",
        ("network", "unfused All-to-All"),
        out / "sc24-networks.png",
    )


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"--out must be a folder that can be made; {error.strerror}. Name another."
        ) from error
