"""``interlace sim nodes``: embeddings between two nodes, measured, simulated and predicted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from interlace.cli.console import make_console
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table
from interlace.costs.known_profiles import shipped_profile
from interlace.costs.network import guessed_network, read_network
from interlace.errors import ConfigError
from interlace_sim.between_nodes import compare, measured_network, with_network
from interlace_sim.cli.run import Changes, parse_changes
from interlace_sim.configfile import read
from interlace_sim.machine import load_machine

_CHANGE = "network.latency_ns=500"
"""An example of ``--set`` for error messages."""


def run_nodes(
    document: Path, machine: str, network: Path | None, changes: Changes, outputs: Outputs
) -> None:
    """Print every measured time beside the simulated and the predicted one.

    Args:
        document: JSON file that ``benchmarks/between_nodes.py`` wrote.
        machine: Preset or YAML file of two GPUs in a network.
        network: JSON file of the measured network, or of a machine profile with one, which the
            machine's network is replaced by; None for the document's, if it has one, else for the
            shipped one, of two H200s over sockets.
        changes: ``KEY=VALUE`` texts of ``--set``.

    Raises:
        ConfigError: a file is of something else, or the machine's GPU has no profile.
    """
    hosts = load_machine(machine, parse_changes(changes, _CHANGE))
    profile = None if hosts.gpu.profile is None else shipped_profile(hosts.gpu.profile)
    if profile is None:
        raise ConfigError("the machine's gpu.profile must be a GPU's; it has none.")
    measured = read(document)
    if network is not None:
        rates = read_network(network)
    else:
        rates = measured_network(measured, str(document)) or guessed_network()
    rows = compare(measured, with_network(hosts, rates), profile, rates, str(document))
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
