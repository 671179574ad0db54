"""``interlace sim compare``: measured times beside simulated ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from interlace.cli.console import make_console, make_table
from interlace.cli.outputs import Outputs
from interlace.costs.known_profiles import shipped_profile
from interlace.costs.network import guessed_network, read_network
from interlace.errors import ConfigError
from interlace.units import format_ns
from interlace_sim import between_nodes
from interlace_sim.cli.progress import show_progress
from interlace_sim.cli.run import Changes, machine_changes
from interlace_sim.configfile import read
from interlace_sim.machine import load_machine
from interlace_sim.t3 import load_t3_machine, measured
from interlace_sim.t3.outputs import draw_measured


def are_of_bench(files: Sequence[Path]) -> bool:
    """Return whether files are of ``interlace bench``, by the first: it has a list of results."""
    document = read(files[0])
    return isinstance(document, dict) and isinstance(document.get("results"), list)


def run_between_nodes(
    files: Sequence[Path],
    *,
    machine: str,
    network: Path | None,
    changes: Changes,
    outputs: Outputs,
) -> None:
    """Print every time between two nodes beside the simulated and the predicted one.

    Args:
        files: The JSON file that ``benchmarks/between_nodes.py`` wrote; only one.
        machine: Preset or YAML file of two GPUs in a network.
        network: JSON file of the measured network, or of a machine profile with one, which the
            machine's network is replaced by; None for the document's, if it has one, else for the
            shipped one, of two H200s over sockets.
        changes: ``KEY=VALUE`` texts of ``--set``.

    Raises:
        ConfigError: a file is of something else, there are several, or the machine's GPU has no
            profile.
    """
    if len(files) > 1:
        raise ConfigError(
            f"a document of benchmarks/between_nodes.py must be compared alone; got {len(files)} "
            "files. Name one."
        )
    hosts = load_machine(machine, machine_changes(changes))
    profile = None if hosts.gpu.profile is None else shipped_profile(hosts.gpu.profile)
    if profile is None:
        raise ConfigError("the machine's gpu.profile must be a GPU's; it has none.")
    document, source = read(files[0]), str(files[0])
    if network is not None:
        rates = read_network(network)
    else:
        rates = between_nodes.measured_network(document, source) or guessed_network()
    hosts = between_nodes.with_network(hosts, rates)
    rows = between_nodes.compare(document, hosts, profile, rates, source)
    table = make_table(
        "rows per bag", "", "slices", "measured, us", "simulated", "error", "predicted", "error"
    )
    for row in rows:
        table.add_row(
            str(row.lookups),
            row.name,
            row.slices,
            f"{row.measured_us:.0f}",
            f"{row.simulated_us:.0f}",
            f"{row.simulated_error:+.0%}",
            f"{row.predicted_us:.0f}",
            f"{row.predicted_error:+.0%}",
        )
    console = make_console()
    console.print(table)
    outputs.write_json(lambda: {"comparisons": [dataclasses.asdict(row) for row in rows]})
    outputs.say_written(console)


def run_bench(files: Sequence[Path], *, machine: str, changes: Changes, outputs: Outputs) -> None:
    """Compare T3 with measured software, shape by shape."""
    loaded = load_t3_machine(machine, machine_changes(changes))
    with show_progress("compare") as runs:
        comparisons, left_out = measured.compare(loaded, files, progress=runs)
    console = make_console()
    console.print(f"{loaded.name}; measured: {', '.join(file.name for file in files)}")
    table = make_table(
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
    for comparison in comparisons:
        table.add_row(
            comparison.operator,
            comparison.product.name,
            format_ns(round(comparison.measured_ns["unfused"])),
            format_ns(comparison.modelled_ns["sequential"]),
            f"{100 * comparison.error:+.1f} %",
            format_ns(round(comparison.software_ns)),
            comparison.software,
            format_ns(round(comparison.corrected_ns("t3-mca"))),
            f"{comparison.gain:.2f}x",
            format_ns(round(comparison.corrected_ns("ideal"))),
            format_ns(round(comparison.floor_ns)),
        )
    console.print(table)
    # Shapes that the model says nothing about are named, not dropped silently.
    if left_out:
        console.print(f"Left out, with fewer tiles than compute units: {', '.join(left_out)}.")
    outputs.write_json(
        lambda: [
            {
                **dataclasses.asdict(comparison),
                "error": comparison.error,
                "software": comparison.software,
                "gain": comparison.gain,
            }
            for comparison in comparisons
        ]
    )
    outputs.write_plot(lambda file: draw_measured(comparisons, file))
    outputs.say_written(console)
