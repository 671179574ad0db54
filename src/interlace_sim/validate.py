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
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from interlace.errors import ConfigError
from interlace.units import GIB, KIB, MIB
from interlace_sim.astra.config import Network, System
from interlace_sim.astra.graph import Node
from interlace_sim.astra.workload import Report, run
from interlace_sim.configfile import integer, listed, mapped, number, parse, read
from interlace_sim.machine import load_machine
from interlace_sim.results import csv_text
from interlace_sim.step import run as run_step
from interlace_sim.work import Collective, Task

TOLERANCE = 0.001
"""Relative tolerance of ASTRA-sim's figures."""
MEASURED_TOLERANCE = 0.05
"""Relative tolerance of measured figures."""
_MOST_CHIPS = 4096
"""Chips of the largest TPU v4."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A recorded figure and ours.

    Attributes:
        source: ``"astra-sim"`` or ``"measured"``.
        quantity: The figure's name and unit.
        bound_ns: The network's physical bound.
        unphysical: Whether ours lies under that bound, as the recorded figure does, because
            ASTRA-sim's congestion-unaware network lets messages share links for nothing.
        problem: Reason for which the case could not be run; it has no figures then, and has not
            passed.
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
    def error(self) -> float | None:
        """Relative difference of ours from the recorded figure, with its sign; None if not run."""
        if self.problem:
            return None
        if not self.theirs:
            return float(self.ours != self.theirs)
        return (self.ours - self.theirs) / self.theirs

    @property
    def passed(self) -> bool:
        """True if ours is within the tolerance of the figure's source."""
        tolerance = TOLERANCE if self.source == "astra-sim" else MEASURED_TOLERANCE
        return self.error is not None and abs(self.error) <= tolerance


def packaged_cases() -> Path:
    """Return the file of recorded runs that comes with the package."""
    return Path(str(resources.files("interlace_sim").joinpath("data", "astra_sim_cases.json")))


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
    for section, source, recorded, runs in _sections(document, str(file)):
        for place, case in enumerate(listed(recorded, f"{file}, {section}")):
            identity = case.get("id") if isinstance(case, dict) else None
            name = str(identity)[:80] if isinstance(identity, str | int) else f"{section}[{place}]"
            location = f"{file}, {section}[{place}] ({name})"
            try:
                cases += runs(mapped(case, location), name, location)
            # A file of many cases may have one that is not modelled; the others are still worth
            # running.
            except ConfigError as error:
                cases.append(Case(name, source, "not run", 0, 0, 0, False, 0, 0, str(error)))
    return cases


_Runs = Callable[[dict[str, Any], str, str], Iterable[Case]]


def _sections(document: dict[str, Any], source: str) -> Iterator[tuple[str, str, Any, _Runs]]:
    """List the parts of a file: name, source of the figures, cases, and the function that runs
    one.
    """
    yield "collectives", "astra-sim", document.get("collectives", []), _collective
    yield "overlap", "astra-sim", document.get("overlap", []), _overlap
    for key, items, origin, runs in (
        ("dlrm_graph", "runs", "astra-sim", _graph),
        ("measured_torus_all_to_all", "rows", "measured", _measured),
    ):
        part = document.get(key) or {}
        mapped(part, f"{source}, {key}")
        shared = {"graph": part.get("graph", [])} if key == "dlrm_graph" else {}
        cases = listed(part.get(items, []), f"{source}, {key}.{items}")
        yield (
            f"{key}.{items}",
            origin,
            [{**case, **shared} if isinstance(case, dict) else case for case in cases],
            runs,
        )


def _figure(case: dict[str, Any], key: str, location: str) -> float:
    """Return a number of a case, which must not be negative."""
    if key not in case:
        raise ConfigError(
            f"{location}: {key} must be given; it is missing. Add it, or remove the case."
        )
    return number(case[key], f"{location}: {key}")


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
                "" if case.error is None else f"{case.error:.6g}",
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
    backend = case.get("backend", "congestion_aware")
    if not str(backend).startswith(("congestion_aware", "congestion_unaware")):
        raise ConfigError(
            f"{location}: backend must begin with congestion_aware or congestion_unaware; got "
            f"{str(backend)[:60]}. Other networks are not modelled."
        )
    start = time.perf_counter()
    report = run(
        network,
        system,
        [graph] * network.npus,
        congestion_aware="unaware" not in backend,
    )
    return report, time.perf_counter() - start


def _collective(case: dict[str, Any], name: str, location: str) -> Iterator[Case]:
    if "collective" not in case:
        raise ConfigError(
            f"{location}: collective must be given; it is missing. Add it, or remove the case."
        )
    size = _figure(case, "comm_size_bytes_per_npu", location)
    node = Node(
        0,
        str(case["collective"]),
        (),
        "collective",
        collective=str(case["collective"]),
        size=integer(size, f"{location}: comm_size_bytes_per_npu"),
    )
    _figure(case, "time_ns_max", location)
    report, seconds = _run(case, [node], location)
    yield from _ends(name, case, report, seconds, location)


def _ends(
    name: str, case: dict[str, Any], report: Report, seconds: float, location: str
) -> Iterator[Case]:
    last = _figure(case, "time_ns_max", location)
    figures: list[tuple[str, float, float]] = [("last NPU, ns", last, report.total_ns)]
    if "time_ns_min" in case:
        first = _figure(case, "time_ns_min", location)
        figures.append(("first NPU, ns", first, min(report.end_ns)))
    # Recorded per NPU; the most exposed one is compared.
    if "exposed_comm_ns" in case:
        key = f"{location}: exposed_comm_ns"
        exposed = [number(value, key) for value in listed(case["exposed_comm_ns"], key)]
        figures.append(("exposed, ns", max(exposed, default=0), max(report.exposed_ns)))
    yield from _compared(name, figures, report, seconds)


def _compared(
    name: str, figures: list[tuple[str, float, float]], report: Report, seconds: float
) -> Iterator[Case]:
    for quantity, theirs, ours in figures:
        # The bound is one of the whole run's time.
        bounded = not quantity.startswith("exposed")
        yield Case(
            name,
            "astra-sim",
            quantity,
            theirs,
            ours,
            report.bound_ns if bounded else 0.0,
            report.unphysical and bounded,
            report.events,
            seconds,
        )


_SIZES = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_KINDS = {"A2A": "all_to_all", "AR": "all_reduce", "AG": "all_gather", "RS": "reduce_scatter"}
_SIZE = r"(\d{1,18})\s*(B|KiB|MiB|GiB)"
_US = r"(\d{1,15})us"
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
        rf"emb {_US} -> {_COLLECTIVE}\({_SIZE}\); bottom {_US} .*top {_US} after both", text
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
    _figure(case, "time_ns_max", location)
    report, seconds = _run(case, graph, location)
    yield from _ends(name, case, report, seconds, location)


def read_graph(items: list[dict[str, Any]], location: str) -> list[Node]:
    """Parse a graph as the cases file writes it.

    A node has id, name, deps, kind (COMP or a collective), and duration_us or bytes.

    Raises:
        ConfigError: a key is missing, or has a value of another kind.
    """
    nodes = []
    for item in listed(items, f"{location}: graph"):
        mapped(item, f"{location}: a node")
        try:
            compute = item["kind"] == "COMP"
            nodes.append(
                Node(
                    integer(item["id"], f"{location}: a node's id"),
                    str(item["name"]),
                    tuple(
                        integer(dep, f"{location}: a node's deps")
                        for dep in listed(item["deps"], f"{location}: a node's deps")
                    ),
                    "compute" if compute else "collective",
                    duration_us=(
                        integer(item["duration_us"], f"{location}: duration_us") if compute else 0
                    ),
                    collective="" if compute else str(item["kind"]).lower(),
                    size=0 if compute else integer(item["bytes"], f"{location}: bytes"),
                )
            )
        except KeyError as error:
            raise ConfigError(
                f"{location}: every node must have id, name, deps, kind and duration_us or bytes; "
                f"{error} is missing."
            ) from error
    return nodes


def _graph(case: dict[str, Any], name: str, location: str) -> Iterator[Case]:
    """Run the file's graph on a case's network."""
    graph = read_graph(case["graph"], location)
    key = f"{location}: times_ns_and_exposed_comm_ns"
    pairs = [
        [number(value, key) for value in listed(pair, key)]
        for pair in listed(case.get("times_ns_and_exposed_comm_ns"), key)
    ]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{key} must have pairs; got {str(pairs)[:60]}.")
    report, seconds = _run(case, graph, location)
    # ASTRA-sim prints every NPU, and the slowest one is compared.
    total, exposed = (max(values) for values in zip(*pairs, strict=True))
    figures: list[tuple[str, float, float]] = [
        ("total, ns", total, report.total_ns),
        ("exposed, ns", exposed, max(report.exposed_ns)),
    ]
    yield from _compared(f"DLRM graph, {len(report.end_ns)} NPUs", figures, report, seconds)


def _measured(row: dict[str, Any], name: str, location: str) -> Iterator[Case]:
    """Compare a measured rate, bytes per node over all-to-all time, with the TPU v4 preset."""
    topology = str(row.get("topology", ""))
    match = re.match(r"(\d{1,4}(?:x\d{1,4})+) torus", topology)
    ranks = math.prod(map(int, match[1].split("x"))) if match else 0
    if not match or not 1 < ranks <= _MOST_CHIPS:
        raise ConfigError(
            f"{location}: topology must begin with the sizes of at most {_MOST_CHIPS} chips and "
            f"torus, such as 4x4x4 torus; got {topology[:60]!r}."
        )
    measured = _figure(row, "measured_GBps", location)
    machine = load_machine("tpuv4-torus")
    size = 256 * MIB
    start = time.perf_counter()
    work = Task("all_to_all", "all_to_all", Collective("all_to_all", "one_shot", size))
    result = run_step(machine, machine.build_topology(ranks, f"torus:{match[1]}"), [work])
    yield Case(
        f"TPU v4 {match[1]} torus",
        "measured",
        "all-to-all, GB/s",
        measured,
        size / result.total_ns,
        result.bound.time_ns,
        False,
        result.events,
        time.perf_counter() - start,
    )
