"""Every file that the simulator reads: damaged at random, it is read, or refused by an error of
ours that names it, in bounded time.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from interlace.costs.known_profiles import shipped_profile
from interlace.costs.network import guessed_network, read_network
from interlace.errors import ConfigError
from interlace_sim import calibrate
from interlace_sim.astra import chakra
from interlace_sim.astra.config import Network, System
from interlace_sim.astra.graph import Node
from interlace_sim.astra.workload import run
from interlace_sim.between_nodes import compare
from interlace_sim.configfile import load, read
from interlace_sim.machine import find, load_machine
from interlace_sim.scenario import Scenario
from interlace_sim.t3.machine import load_t3_machine
from interlace_sim.t3.measured import compare as compare_t3
from interlace_sim.t3.models import load_t3_model
from interlace_sim.validate import packaged_cases, validate

_NETWORK = {"topology": ["Ring", "Switch"], "npus_count": [2, 2], "bandwidth": [10, 20.5]}
_NETWORK |= {"latency": [1, 2.5]}
_SYSTEM = {
    "scheduling-policy": "FIFO",
    "endpoint-delay": 10,
    "active-chunks-per-dimension": 2,
    "preferred-dataset-splits": 2,
    "all-reduce-implementation": ["ring", "direct1"],
    "local-mem-bw": 1600,
    "roofline-enabled": 1,
    "peak-perf": 900.5,
    "replay-only": 0,
}
_GRAPH = [
    Node(0, "product", flops=10**6, size=10**5, duration_us=1),
    Node(1, "sum", (0,), "collective", collective="all_reduce", size=4096),
    Node(2, "sum of some", (1,), "collective", collective="all_reduce", size=4096, group=1),
]
_GROUPS = {"1": [0, 1, 2, 3], "2": [0, 1]}
_BETWEEN_NODES = {
    "sizes": {"tables": 2, "width": 16, "batch": 64},
    "results": {"lookups": {"4": {"us": {"pair": 2000.5, "fused": 10}, "slices": [1, 2]}}},
}
_BENCH_ROW: dict[str, Any] = {
    "operator": "gemm_reduce_scatter",
    "shape": "small",
    "rows": 128,  # so few tiles that nothing is simulated
    "columns": 128,
    "inner": 64,
    "world_size": 2,
    "floor_us": 1.5,
    "times": {name: {"median_us": 20.5} for name in ("cuBLAS + NCCL", "cuBLAS alone", "fused")},
}
_MEASUREMENTS = {
    "products": [{"m": 128 * i, "n": 64, "k": 64, "us": 4.5 + i} for i in range(1, 9)],
    "timings": [
        {"op": "all_reduce", "gpus": 2, "bytes": 512 * i, "us": 5.5 + i} for i in range(1, 9)
    ],
    "results": [{"rows": 1, "columns": 2, "inner": 3, "times": {}}],
}


def _simulate(network: Network, system: System, groups: dict[int, list[int]]) -> None:
    run(network, system, [_GRAPH] * network.npus if network.npus < 64 else [], groups=groups)


def _run_network(file: Path) -> None:
    _simulate(load(Network, file), System(), {1: [0, 1, 2, 3]})


def _run_system(file: Path) -> None:
    _simulate(Network.model_validate(_NETWORK), load(System, file), {1: [0, 1, 2, 3]})


def _run_groups(file: Path) -> None:
    _simulate(Network.model_validate(_NETWORK), System(), chakra.read_groups(file))


def _run_machine(file: Path) -> None:
    Scenario("collective", machine=str(file), nodes=2, size=4096).simulate()


def _run_model(kind: str, nodes: int, **choices: int) -> Callable[[Path], None]:
    def simulate(file: Path) -> None:
        Scenario(kind, model=str(file), nodes=nodes, **choices).step()

    return simulate


def _run_between_nodes(file: Path) -> None:
    profile = shipped_profile("NVIDIA H200")
    assert profile is not None
    compare(read(file), load_machine("h200-two-hosts"), profile, guessed_network(), str(file))


def _calibrate(file: Path) -> None:
    products, timings = calibrate.read_measurements([file])
    # A fit of arbitrary numbers is slow, and reads no file.
    assert all(item.ns > 0 for item in (*products, *timings))


def _preset(folder: str, name: str) -> Any:
    return yaml.safe_load(find(folder, name).read_text(encoding="utf-8"))


def _cases() -> dict[str, Any]:
    document = json.loads(packaged_cases().read_text(encoding="utf-8"))
    case = {**document["collectives"][0], "network": {**_NETWORK}, "npus": 4}
    case["collective"], case["comm_size_bytes_per_npu"] = "all_gather", 4096
    case["system"] = {"all-gather-implementation": ["ring", "ring"]}
    item = {"id": 0, "name": "a", "deps": [], "kind": "COMP", "duration_us": 3}
    overlap = {key: case[key] for key in ("id", "network", "system", "time_ns_max", "backend")}
    graph_run = {"network": _NETWORK, "system": {}, "times_ns_and_exposed_comm_ns": [[3000, 0]]}
    return {
        "collectives": [case],
        "overlap": [{**overlap, "workload": "one A2A 4 KiB", "exposed_comm_ns": [5]}],
        "dlrm_graph": {"graph": [item], "runs": [graph_run]},
        "measured_torus_all_to_all": {"rows": [{"topology": "2x2 torus", "measured_GBps": 75.9}]},
    }


READERS: dict[str, tuple[Callable[[], Any], Callable[[Path], Any]]] = {
    "network": (lambda: _NETWORK, _run_network),
    "system": (lambda: _SYSTEM, _run_system),
    "groups": (lambda: _GROUPS, _run_groups),
    "cases": (_cases, validate),
    "machine": (lambda: _preset("machines", "h200-cluster"), _run_machine),
    "dlrm": (lambda: _preset("dlrm", "mlperf"), _run_model("dlrm", 2)),
    "transformer": (
        lambda: _preset("transformer", "llama3-70b"),
        _run_model("transformer", 8, tensor=8, pipeline=8),
    ),
    "moe": (lambda: _preset("moe", "mixtral-8x7b"), _run_model("moe", 2)),
    "T3 machine": (
        lambda: _preset("t3_machines", "t3-h200"),
        lambda file: load_t3_machine(str(file)),
    ),
    "T3 model": (lambda: _preset("t3_models", "t-nlg"), lambda file: load_t3_model(str(file))),
    "T3, measured": (
        lambda: {"results": [_BENCH_ROW]},
        lambda file: compare_t3(load_t3_machine("t3-h200"), [file]),
    ),
    "between nodes": (lambda: _BETWEEN_NODES, _run_between_nodes),
    "rates": (lambda: dataclasses.asdict(guessed_network()), read_network),
    "measurements": (lambda: _MEASUREMENTS, _calibrate),
}
DRAWS = 20
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**70,
    10**400,
    1e308,
    1e-320,
    0.5,
    float("nan"),
    float("inf"),
    "x",
    "1e5",
    "",
    [],
    {},
    [1, "a", None],
    {"value": -5},
    [[[]]],
    "9" * 5000,
)
_BYTES = (b"\xff", b"\x00", b"{", b"[" * 50_000, b'"', b",", b"9" * 5000, b"-", b"&a ", b"*a ")


@pytest.fixture(autouse=True)
def a_minute() -> Iterator[None]:
    """Turn a reader that does not end into a failure that names its file."""

    def late(*_: object) -> None:
        raise TimeoutError("a file was not read within a minute")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _damaged(document: Any, draw: random.Random) -> bytes:
    """Return a document with one or two values, keys or bytes that are wrong."""
    if draw.random() < 0.2:
        text = json.dumps(document).encode()
        at = draw.randrange(len(text))
        return text[:at] + draw.choice((b"", draw.choice(_BYTES) + text[at + 1 :]))
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2))):
        holder, key = None, None
        part = document
        while isinstance(part, dict | list) and part and (holder is None or draw.random() < 0.8):
            holder = part
            key = draw.choice(list(part) if isinstance(part, dict) else range(len(part)))
            part = part[key]
        if holder is None:
            return json.dumps(draw.choice(_VALUES)).encode()
        change = draw.random()
        if change < 0.1:
            del holder[key]
        elif change < 0.15 and isinstance(holder, dict):
            holder["unknown"] = draw.choice(_VALUES)
        else:
            holder[key] = draw.choice(_VALUES)
    return json.dumps(document).encode()


@pytest.mark.parametrize("reader", READERS)
def test_damaged_documents(reader: str, tmp_path: Path) -> None:
    make, use = READERS[reader]
    document = make()
    draw = random.Random(reader)
    file = tmp_path / "whole.json"
    file.write_text(json.dumps(document))
    use(file)
    refused = 0
    for number in range(DRAWS):
        # JSON is YAML, but for what the two call a number, so half are read as that.
        file = tmp_path / f"{number}.{draw.choice(('json', 'yaml'))}"
        file.write_bytes(_damaged(document, draw))
        message = ""
        try:
            use(file)
        except ConfigError as error:
            message = str(error)
            refused += 1
        # What does not fit together is said of an NPU and its node, or of ranks.
        assert not message or file.name in message or re.search("NPU|group|ranks|GPUs", message)
    assert refused > DRAWS / 5


def test_damaged_traces(tmp_path: Path) -> None:
    """Attributes of every type and size, bytes that are another's, and ends that are missing."""
    pytest.importorskip("chakra")
    from chakra.schema.protobuf import et_def_pb2 as definitions

    draw = random.Random(7)
    file = tmp_path / "trace.0.et"
    names = ("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "comm_priority")
    names += ("pg_name", "involved_dim", "num_ops", "tensor_size", "is_cpu_op")
    values: tuple[dict[str, Any], ...] = (
        {"int64_val": 0},
        {"int64_val": -1},
        {"int64_val": 8},
        {"uint64_val": 2**64 - 1},
        {"int32_val": 5},
        {"bool_val": True},
        {"double_val": float("nan")},
        {"float_val": float("inf")},
        {"string_val": "1"},
        {"string_val": "--5"},
        {"string_val": "9" * 5000},
        {"bytes_val": b"\xff"},
        {"bool_list": definitions.BoolList(values=[True, False])},
        {"int64_list": definitions.Int64List(values=[1] * 50)},
        {},
    )
    groups = (
        "",
        "[['[]']]",
        '[\'[{"pg_name": "1", "ranks": [0, 1]}]\']',
        '[\'[{"pg_name": "0", "ranks": [1, 0]}, {"pg_name": "a", "ranks": []}]\']',
        '[\'[{"pg_name": "1", "ranks": [0, 5]}]\']',
        '[\'[{"pg_name": "1"}]\']',
        '[\'{"pg_name": "1", "ranks": 3}\']',
        '[\'"pg_name"' + "[" * 50_000 + "']",
    )
    network = Network(topology=["Ring"], npus_count=[2], bandwidth=[1], latency=[1])
    outcomes = []
    for _ in range(10 * DRAWS):
        messages: list[Any] = [definitions.GlobalMetadata(version="0.0.4")]
        for ident in range(draw.randrange(1, 4)):
            node = definitions.Node(id=ident, name="n", type=draw.randrange(9))
            node.duration_micros = draw.choice((0, 1, 2**64 - 1))
            node.data_deps.extend(draw.choice(((), (), (0,), (ident,), (9,))))
            node.inputs.values = draw.choice(groups)
            # Most nodes are whole, so that something is left to run.
            whole = {"comm_type": 0, "comm_size": 64, "comm_dst": 1, "comm_src": 1}
            given = {name: {"int64_val": value} for name, value in whole.items()}
            for name in draw.sample(names, draw.randrange(3)):
                given[name] = draw.choice(values)
            for name, value in given.items():
                node.attr.append(definitions.AttributeProto(name=name, **value))
            messages.append(node)
        stream = io.BytesIO()
        for message in messages:
            chakra._append(stream, message)
        file.write_bytes(stream.getvalue())
        if draw.random() < 0.2:
            content = file.read_bytes()
            at = draw.randrange(len(content))
            file.write_bytes(content[:at] + draw.choice((b"", b"\xff" + content[at + 1 :])))
        system = System(replay_only=draw.random() < 0.3)
        message = ""
        try:
            graph = chakra.read_trace(file, replay_only=system.replay_only)
            outcomes.append(run(network, system, [graph, graph]).total_ns)
        except ConfigError as error:
            message = str(error)
        assert not message or re.search("trace.0.et|NPU|group", message)
    assert 0 < len(outcomes) < 10 * DRAWS


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ('{"a": 1, "a": 2}', ".json", "'a' is given twice; remove one"),
        ("a: 1\nb: 2\na: 3\n", ".yml", "line 1, column 1 must be YAML; 'a' is given twice"),
        (
            "a: &x [1]\nb: [*x, *x]\n",
            ".yml",
            "line 2, .* must be YAML; an alias stands for a value",
        ),
        ('{"a": NaN}', ".json", "must be JSON; NaN is not a number of JSON"),
        ('{"a": 1e999}', ".json", "must be JSON; '1e999' is too large for a number"),
        ("[" * 100_000, ".json", "must be JSON that is not nested thousands deep"),
        ("\ud800", ".json", "must be a file that can be read; it is not text in UTF-8"),
        ("x" * (2**20 + 1), ".yml", "must have at most 1048576 bytes of YAML; it has more"),
    ],
    ids=range(8),
)
def test_what_no_file_may_hold(text: str, suffix: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / f"file{suffix}"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=rf"file{suffix}.*{message}"):
        read(file)
