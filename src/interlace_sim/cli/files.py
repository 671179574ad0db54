"""Commands of ``interlace sim`` around files: Chakra traces, recorded runs, machines, presets."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.cli.console import make_console, make_table
from interlace.cli.outputs import Outputs, write_text
from interlace.errors import ConfigError
from interlace_sim import calibrate, plot, validate
from interlace_sim.astra import chakra
from interlace_sim.astra.bound import LEFT_OUT
from interlace_sim.astra.config import Network, System
from interlace_sim.astra.workload import run as run_graphs
from interlace_sim.configfile import load, read
from interlace_sim.machine import find, load_machine, presets
from interlace_sim.trace import report_to_perfetto


def run_chakra(
    prefix: str,
    *,
    network_configuration: Path,
    system_configuration: Path,
    comm_group_configuration: Path | None,
    congestion_unaware: bool,
    outputs: Outputs,
) -> None:
    """Run ASTRA-sim's inputs with ASTRA-sim's semantics; unphysical outcomes are flagged."""
    net, config = load(Network, network_configuration), load(System, system_configuration)
    graphs = chakra.read_traces(prefix, net.npus, replay_only=config.replay_only)
    groups = comm_group_configuration
    report = run_graphs(
        net,
        config,
        graphs,
        congestion_aware=not congestion_unaware,
        groups=chakra.read_groups(groups) if groups else None,
    )
    console = make_console()
    console.print(
        f"{net.npus} NPUs: last ends at {report.total_ns} ns, first at {min(report.end_ns)} ns; "
        f"exposed communication at most {max(report.exposed_ns)} ns."
    )
    for warning in report.warnings:
        console.print(f"Warning: {warning}", style="yellow")
    console.print(
        f"Physical bound: {report.bound_ns:.0f} ns, by {report.bound_reason}. Not in it: "
        f"{'; '.join(LEFT_OUT)}."
    )
    # ASTRA-sim's own results are reported and not refused.
    if report.unphysical:
        console.print(
            "UNPHYSICAL: the result lies under the bound. The congestion-unaware network lets "
            "messages share links for nothing, and the roofline gives FLOPs without bytes no time.",
            style="bold red",
        )
    console.print(f"{report.events:,} events.", style="dim")
    outputs.write_json(
        lambda: {
            "end_ns": report.end_ns,
            "exposed_ns": report.exposed_ns,
            "bound_ns": round(report.bound_ns),
            "bound_reason": report.bound_reason,
            "not_in_bound": list(LEFT_OUT),
            "unphysical": report.unphysical,
            "warnings": list(report.warnings),
            "sent_bytes": report.sent_bytes,
            "events": report.events,
            "spans": [
                [{"node": node, "start_ns": start, "end_ns": end} for node, start, end in spans]
                for spans in report.spans
            ],
        }
    )
    outputs.write_trace(lambda: report_to_perfetto(report, graphs))
    outputs.say_written(console)


def run_validate(cases_file: Path | None, outputs: Outputs, brief: bool) -> int:
    """Run recorded cases, print their errors, and write them as CSV, JSON and a picture.

    Returns:
        The command's exit status: 0 if every case is within its tolerance, else 1.
    """
    started = time.perf_counter()
    cases = validate.validate(cases_file)
    seconds = time.perf_counter() - started
    console = make_console()
    headings = ("case", "quantity", "recorded", "ours", "error", "")
    table = make_table(*headings, left=("case", "quantity", ""))
    for case in cases:
        if not brief or not case.passed or case.source == "measured":
            note = "" if case.passed else "FAILED"
            figures = ("", "", "")
            if case.error is not None:
                error = f"{100 * case.error:+.3f} %"
                figures = (f"{case.theirs:.10g}", f"{case.ours:.10g}", error)
            table.add_row(
                case.name,
                case.quantity,
                *figures,
                note + (" unphysical" if case.unphysical else ""),
            )
    if table.row_count:
        console.print(table)
    # Measured figures have a tolerance of their own and are not part of the exactness.
    astra = [case for case in cases if case.source == "astra-sim" and not case.problem]
    errors = [abs(case.error or 0) for case in astra]
    passed = sum(case.passed for case in cases)
    exact = errors.count(0)
    names = {case.name for case in astra}
    for case in cases:
        if case.problem:
            console.print(f"{case.name} was not run: {case.problem}")
    if astra:
        console.print(
            f"ASTRA-sim: {len(astra)} figures of {len(names)} runs, {exact} exact to the "
            f"nanosecond, largest error {100 * max(errors):.4f} %."
        )
    flagged = sorted({case.name for case in cases if case.unphysical})
    if flagged:
        console.print(
            f"{len(flagged)} recorded runs of the congestion-unaware network lie under the "
            f"physical bound, and so do ours: {', '.join(flagged)}."
        )
    # A run yields several figures, and its events count once.
    events = sum({(case.name, case.events): case.events for case in cases}.values())
    console.print(
        f"{passed} of {len(cases)} figures within tolerance ({100 * validate.TOLERANCE:g} % of "
        f"ASTRA-sim's, {100 * validate.MEASURED_TOLERANCE:g} % of measured ones); {events:,} "
        f"events, {seconds:.1f} s."
    )
    outputs.write("validate.csv", validate.to_csv(cases))
    outputs.write(
        "validate.json",
        [
            {**dataclasses.asdict(case), "error": case.error, "passed": case.passed}
            for case in cases
        ],
    )
    # The picture's axes are logarithmic, so cases of no time cannot be in it.
    groups = [
        (case.quantity.split(",")[0], case.theirs, case.ours)
        for case in astra
        if case.theirs > 0 and case.ours > 0
    ]
    draw = functools.partial(
        plot.correlation,
        groups,
        f"ASTRA-sim and this simulator: {exact} of {len(astra)} figures equal",
        ("ASTRA-sim, ns", "ours, ns"),
    )
    if groups:
        outputs.write("validate.png", draw)
    outputs.say_written(console)
    return 0 if passed == len(cases) else 1


def run_calibrate(
    files: Sequence[Path], out: Path, base_name: str, gpus: int | None, name: str, source: str
) -> None:
    """Fit a machine to measurements, print the errors of the fit, and write the machine file."""
    products, timings = calibrate.read_measurements(files)
    # Libraries change their algorithms with the number of GPUs, so a fit may be limited to one
    # number.
    timings = [timing for timing in timings if gpus is None or timing.gpus == gpus]
    base = load_machine(base_name)
    # Measurements come from one node, whose links are those of the inner network if there is one.
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
            f"{fit.quantity}: fitted to {fit.points} points; on {fit.held_out} held-out points "
            f"{100 * fit.mean_error:.1f} % mean, "
            f"{100 * fit.median_error:.1f} % median, {100 * fit.worst_error:.0f} % largest error"
        )
        for key, value in fit.values.items():
            console.print(f"  {key} = {value:.4g}")
    source = source or ", ".join(file.name for file in files)
    document = calibrate.machine_document(
        base, fits, source, name, gpus or max((t.gpus for t in timings), default=1)
    )
    write_text(out, calibrate.to_yaml(document))
    console.print(f"Written: {out}")


def run_presets(name: str | None, yaml: Path | None) -> None:
    """List the presets, or show one: the source of each value, or its file as it is to ``yaml``."""
    console = make_console()
    folders = ("machines", "dlrm", "transformer", "moe", "t3_machines", "t3_models")
    if name is None:
        for folder in folders:
            console.print(
                f"{folder}: {', '.join(_listed(folder, name) for name in presets(folder))}"
            )
        console.print(
            "--nodes counts nodes of as many GPUs as stand beside a machine, and single GPUs of a "
            "machine without a number.",
            style="dim",
        )
        console.print(
            "Show one with its sources: interlace sim presets NAME; begin a file of your own: "
            "interlace sim presets NAME --yaml mine.yaml",
            style="dim",
        )
        return
    # A name in several folders shows the first of them, in the order of the list above.
    folder = next((candidate for candidate in folders if name in presets(candidate)), "")
    if not folder:
        raise ConfigError(
            f"a preset must be one of {', '.join(p for f in folders for p in presets(f))}; got "
            f"{name!r}."
        )
    file = find(folder, name)
    if yaml is not None:
        write_text(yaml, file.read_text(encoding="utf-8"))
        console.print(f"Written: {yaml}")
        return
    document = read(file)
    headings = ("key", "value", "confidence", "source")
    table = make_table(*headings, left=headings, title=f"{folder}: {document['name']}")
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
        # Name and note stand above and below the table.
        elif key not in ("name", "note"):
            table.add_row(key, str(value), "", "")
    console.print(table)
    if document.get("note"):
        console.print(document["note"].strip(), style="dim")


def _listed(folder: str, name: str) -> str:
    """Return a preset's name, with the GPUs of a node if it is a machine with several of them."""
    node = read(find(folder, name)).get("node") if folder == "machines" else None
    return f"{name} ({node['gpus']} GPUs per node)" if node else name


def _flat(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in document.items():
        if isinstance(value, dict) and "value" not in value:
            out += _flat(value, f"{prefix}{key}.")
        else:
            out.append((prefix + key, value))
    return out
