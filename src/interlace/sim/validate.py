"""Validation: recorded runs of ASTRA-sim and measured all-to-alls, run again.

ASTRA-sim's runs use the compatibility mode, measured all-to-alls the simulator's own network.

The file has four parts, all optional: ``collectives`` (one collective each), ``overlap`` (small
graphs, described in words), ``dlrm_graph`` (a graph and runs of it), and
``measured_torus_all_to_all``. The package has the published ones.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from interlace.errors import ConfigError
from interlace.sim.astra.config import Network, System
from interlace.sim.astra.graph import Node
from interlace.sim.astra.workload import Report, run
from interlace.sim.configfile import parse, read
from interlace.sim.machine import load_machine
from interlace.sim.results import csv_text
from interlace.sim.step import run as run_step
from interlace.sim.work import Collective, Task
from interlace.units import GIB, KIB, MIB

TOLERANCE = 0.001
"""Relative tolerance of ASTRA-sim's figures."""
MEASURED_TOLERANCE = 0.05
"""Relative tolerance of measured figures."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A recorded figure and ours.

    Attributes:
        source: ``"astra-sim"`` or ``"measured"``.
        quantity: the figure's name and unit.
        bound_ns: the network's physical bound.
        unphysical: whether ours lies under that bound, as the recorded figure does, because
            ASTRA-sim's congestion-unaware network lets messages share links for nothing.
        problem: reason for which the case could not be run; it has not passed then.
    """

    name: str
    source: str
    quantity: str
    theirs: float
    ours: float
    bound_ns: float
    unphysical: bool
    events: int
    seconds: float
    problem: str = ""

    @property
    def error(self) -> float:
        """Relative difference of ours from the recorded figure, with its sign."""
        return (
            (self.ours - self.theirs) / self.theirs
            if self.theirs
            else float(self.ours != self.theirs)
        )

    @property
    def passed(self) -> bool:
        """True if ours is within the tolerance of the figure's source."""
        return not self.problem and abs(self.error) <= (
            TOLERANCE if self.source == "astra-sim" else MEASURED_TOLERANCE
        )


def packaged_cases() -> Path:
    """Return the file of recorded runs that comes with the package."""
    return Path(str(resources.files("interlace.sim").joinpath("data", "astra_sim_cases.json")))


def validate(file: Path | None = None) -> list[Case]:
    """Run every case of a file.

    A case that cannot be run is reported as such, and does not keep the cases after it from being
    run.

    Raises:
        ConfigError: the file cannot be read, or has no cases.
    """
    file = file or packaged_cases()
    document = read(file)
    if not isinstance(document, dict) or not any(
        key in document for key in ("collectives", "overlap", "dlrm_graph")
    ):
        raise ConfigError(
            f"{file} must have collectives, overlap or dlrm_graph; it has none. See "
            "docs/simulator.md for the format."
        )
    cases: list[Case] = []
    for section, runs in (("collectives", _collective), ("overlap", _overlap)):
        for number, case in enumerate(document.get(section, [])):
            name = str(case.get("id", number))
            try:
                cases += runs(case, name, f"{file}, {section}[{number}] ({name})")
            # A file of many cases may have one that is not modelled; the others are still worth
            # running.
            except ConfigError as error:
                theirs = float(case.get("time_ns_max", 0))
                cases.append(
                    Case(name, "astra-sim", "not run", theirs, 0.0, 0.0, False, 0, 0.0, str(error))
                )
    cases += _graph(document.get("dlrm_graph"), file)
    cases += _measured(document.get("measured_torus_all_to_all"), file)
    return cases


def to_csv(cases: list[Case]) -> str:
    """Return the cases as CSV, one line per figure."""
    header = [
        "case",
        "source",
        "quantity",
        "theirs",
        "ours",
        "error",
        "passed",
        "unphysical",
        "bound_ns",
        "events",
        "seconds",
    ]
    return csv_text(
        header,
        (
            [
                case.name,
                case.source,
                case.quantity,
                case.theirs,
                case.ours,
                f"{case.error:.6g}",
                int(case.passed),
                int(case.unphysical),
                round(case.bound_ns),
                case.events,
                f"{case.seconds:.3f}",
            ]
            for case in cases
        ),
    )


def _run(case: dict[str, Any], graph: list[Node], location: str) -> tuple[Report, float]:
    network = parse(Network, case.get("network"), f"{location}, network")
    system = parse(System, case.get("system"), f"{location}, system")
    if "npus" in case and case["npus"] != network.npus:
        raise ConfigError(
            f"{location}: npus must be the product of npus_count; got {case['npus']} and "
            f"{network.npus}. Correct one."
        )
    start = time.perf_counter()
    report = run(
        network,
        system,
        [graph] * network.npus,
        congestion_aware="unaware" not in case.get("backend", "congestion_aware"),
    )
    return report, time.perf_counter() - start


def _collective(case: dict[str, Any], name: str, location: str) -> Iterator[Case]:
    for key in ("collective", "comm_size_bytes_per_npu", "time_ns_max"):
        if key not in case:
            raise ConfigError(
                f"{location}: {key} must be given; it is missing. Add it, or remove the case."
            )
    node = Node(
        0,
        case["collective"],
        (),
        "collective",
        collective=case["collective"],
        size=case["comm_size_bytes_per_npu"],
    )
    report, seconds = _run(case, [node], location)
    yield from _ends(name, case, report, seconds)


def _ends(name: str, case: dict[str, Any], report: Report, seconds: float) -> Iterator[Case]:
    figures = [("last NPU, ns", "time_ns_max", report.total_ns)]
    if "time_ns_min" in case:
        figures.append(("first NPU, ns", "time_ns_min", min(report.end_ns)))
    for quantity, key, ours in figures:
        yield Case(
            name,
            "astra-sim",
            quantity,
            case[key],
            ours,
            report.bound_ns,
            report.unphysical,
            report.events,
            seconds,
        )


_SIZES = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_KINDS = {"A2A": "all_to_all", "AR": "all_reduce", "AG": "all_gather", "RS": "reduce_scatter"}
_SIZE = r"(\d+)\s*(B|KiB|MiB|GiB)"
_COLLECTIVE = r"(ALL_TO_ALL|ALL_REDUCE|ALL_GATHER|REDUCE_SCATTER|A2A|AR|AG|RS)"


def describe(text: str, location: str) -> list[Node]:
    """Parse a description of a graph.

    It is one collective; or an embedding, a collective in parallel with a bottom MLP, and a top
    MLP.

    Raises:
        ConfigError: the text is neither.
    """
    single = re.match(rf"one {_COLLECTIVE} {_SIZE}", text)
    if single:
        kind = _KINDS.get(single[1], single[1].lower())
        size = int(single[2]) * _SIZES[single[3]]
        return [Node(0, single[1], (), "collective", collective=kind, size=size)]
    # The one graph of several nodes that the recorded runs describe in words.
    chain = re.match(
        rf"emb (\d+)us -> {_COLLECTIVE}\({_SIZE}\); bottom (\d+)us .*top (\d+)us after both", text
    )
    if chain:
        kind = _KINDS.get(chain[2], chain[2].lower())
        return [
            Node(0, "embedding", duration_us=int(chain[1])),
            Node(
                1,
                chain[2],
                (0,),
                "collective",
                collective=kind,
                size=int(chain[3]) * _SIZES[chain[4]],
            ),
            Node(2, "bottom", (0,), duration_us=int(chain[5])),
            Node(3, "top", (1, 2), duration_us=int(chain[6])),
        ]
    raise ConfigError(
        f"{location}: workload must read 'one ALL_TO_ALL 4 KiB ...' or 'emb 100us -> A2A(16MiB); "
        f"bottom 150us ...; top 20us after both'; got {text!r}."
    )


def _overlap(case: dict[str, Any], name: str, location: str) -> Iterator[Case]:
    graph = (
        read_graph(case["graph"], location)
        if "graph" in case
        else describe(str(case.get("workload")), location)
    )
    report, seconds = _run(case, graph, location)
    yield from _ends(name, case, report, seconds)
    # Recorded per NPU; the most exposed one is compared.
    exposed = case.get("exposed_comm_ns")
    if exposed:
        yield Case(
            name,
            "astra-sim",
            "exposed, ns",
            max(exposed),
            max(report.exposed_ns),
            0.0,
            False,
            report.events,
            seconds,
        )


def read_graph(items: list[dict[str, Any]], location: str) -> list[Node]:
    """Parse a graph as the cases file writes it.

    A node has id, name, deps, kind (COMP or a collective), and duration_us or bytes.

    Raises:
        ConfigError: a key is missing.
    """
    nodes = []
    for item in items:
        try:
            compute = item["kind"] == "COMP"
            nodes.append(
                Node(
                    item["id"],
                    item["name"],
                    tuple(item["deps"]),
                    "compute" if compute else "collective",
                    duration_us=item["duration_us"] if compute else 0,
                    collective="" if compute else item["kind"].lower(),
                    size=0 if compute else item["bytes"],
                )
            )
        except KeyError as error:
            raise ConfigError(
                f"{location}: every node must have id, name, deps, kind and duration_us or bytes; "
                f"{error} is missing."
            ) from error
    return nodes


def _graph(part: dict[str, Any] | None, file: Path) -> Iterator[Case]:
    if not part:
        return
    graph = read_graph(part.get("graph", []), f"{file}, dlrm_graph")
    for number, case in enumerate(part.get("runs", [])):
        report, seconds = _run(case, graph, f"{file}, dlrm_graph.runs[{number}]")
        name = f"DLRM graph, {len(report.end_ns)} NPUs"
        for number, (quantity, ours) in enumerate(
            (("total, ns", report.end_ns), ("exposed, ns", report.exposed_ns))
        ):
            # ASTRA-sim prints every NPU, and the slowest one is compared.
            theirs = max(pair[number] for pair in case["times_ns_and_exposed_comm_ns"])
            yield Case(
                name,
                "astra-sim",
                quantity,
                theirs,
                max(ours),
                report.bound_ns,
                report.unphysical,
                report.events,
                seconds,
            )


def _measured(part: dict[str, Any] | None, file: Path) -> Iterator[Case]:
    """Compare measured rates, bytes per node over all-to-all time, with the TPU v4 preset."""
    for row in (part or {}).get("rows", []):
        match = re.match(r"(\d+(?:x\d+)+) torus", row.get("topology", ""))
        if not match:
            raise ConfigError(
                f"{file}, measured_torus_all_to_all: topology must begin with sizes and torus, "
                f"such as 4x4x4 torus; got {row.get('topology')!r}."
            )
        machine = load_machine("tpuv4-torus")
        ranks = math.prod(map(int, match[1].split("x")))
        size = 256 * MIB
        start = time.perf_counter()
        work = Task("all_to_all", "all_to_all", Collective("all_to_all", "one_shot", size))
        result = run_step(machine, machine.build_topology(ranks, f"torus:{match[1]}"), [work])
        yield Case(
            f"TPU v4 {match[1]} torus",
            "measured",
            "all-to-all, GB/s",
            row["measured_GBps"],
            size / result.total_ns,
            result.bound.time_ns,
            False,
            result.events,
            time.perf_counter() - start,
        )
