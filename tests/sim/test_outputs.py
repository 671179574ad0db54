"""What comes out: tables, traces, pictures, sweeps, fits, the study, and the commands that make
them.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import inspect
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from typer.testing import Result as CliResult

from interlace.cli.app import app
from interlace.errors import ConfigError
from interlace.units import format_bytes, format_ns, format_number
from interlace_sim import calibrate, plot, reproduce
from interlace_sim.cli import progress as sim_progress
from interlace_sim.cli.commands import sim_app
from interlace_sim.cli.studies import STUDIES
from interlace_sim.defaults import DEFAULTS
from interlace_sim.layer_picture import windows
from interlace_sim.machine import load_machine
from interlace_sim.results import LinkUse, Result
from interlace_sim.scenario import Scenario
from interlace_sim.step import run
from interlace_sim.sweeps import parse_parameter, sweep, to_csv
from interlace_sim.t3 import load_t3_machine
from interlace_sim.timeline import busy_until
from interlace_sim.trace import to_perfetto
from interlace_sim.validate import packaged_cases
from interlace_sim.work import Collective, Task

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [Scenario("dlrm", nodes=16, fused=fused).simulate() for fused in ("none", "both")]


def command(*arguments: object, code: int = 0) -> CliResult:
    done = CliRunner().invoke(app, ["sim", *(str(argument) for argument in arguments)])
    assert done.exit_code == code, done.output
    return done


# Results.


def test_json_and_csv_have_everything(results: list[Result]) -> None:
    document = json.loads(json.dumps(results[0].to_json()))
    assert document["total_ns"] == results[0].total_ns >= document["bound_ns"] > 0
    assert document["sent_bytes"].keys() == {"x+", "x-", "y+", "y-"}
    lines = list(csv.DictReader(io.StringIO(results[0].to_csv())))
    assert len(lines) == len(results[0].tasks)
    critical = [line["task"] for line in lines if line["critical"] == "1"]
    assert "All-to-All" in critical
    assert "copy of the next batch" not in critical


def test_trace_opens_in_perfetto(results: list[Result]) -> None:
    """Every slice has a named row, lies within the run, and flows begin and end in slices."""
    trace = json.loads(json.dumps(to_perfetto(results)))["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    names = [name for (pid, _), name in rows.items() if pid == 0]
    assert names == [
        "compute",
        "all_reduce",
        "all_to_all",
        "link x+",
        "link x-",
        "link y+",
        "link y-",
    ]
    slices = [e for e in trace if e["ph"] == "X"]
    assert all(
        e["ts"] >= 0 and e["ts"] + e["dur"] <= results[e["pid"]].total_ns / 1000 + 1e-6
        for e in slices
    )
    assert {(e["pid"], e["tid"]) for e in slices} == set(rows)
    starts = {e["id"]: e for e in trace if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace if e["ph"] == "f"}
    assert starts.keys() == ends.keys() != set()
    for flow in ends.values():
        assert any(
            (e["pid"], e["tid"], e["ts"]) == (flow["pid"], flow["tid"], flow["ts"]) for e in slices
        )


def test_traces_and_pictures_look_at_each_use_a_few_times(
    results: list[Result], tmp_path: Path
) -> None:
    """And not once per task: of a step with thousands of tasks that took minutes."""
    passes = 0

    class Counted(list[LinkUse]):
        def __iter__(self) -> Iterator[LinkUse]:
            nonlocal passes
            passes += 1
            return super().__iter__()

    assert len(results[0].tasks) > 20
    counted = dataclasses.replace(results[0], link_uses=Counted(results[0].link_uses))
    assert to_perfetto([counted]) == to_perfetto(results[:1])
    plot.timeline([counted], tmp_path / "timeline.png")
    assert passes < 10


def test_flows_lead_to_the_first_and_last_bytes(results: list[Result]) -> None:
    trace = to_perfetto(results[:1])["traceEvents"]
    task = next(task for task in results[0].tasks if task.name == "gradient All-to-All")
    starts = [
        use.start_ns
        for use in results[0].link_uses
        if use.traffic == "all_to_all" and task.start_ns <= use.start_ns <= task.end_ns
    ]
    flows = {e["id"]: e for e in trace if e["ph"] == "s" and e["ts"] == task.start_ns / 1000}
    ends = [e["ts"] for e in trace if e["ph"] == "f" and e["id"] in flows]
    assert sorted(ends) == [min(starts) / 1000, max(starts) / 1000]


@given(
    uses=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1),
    edges=st.lists(st.integers(0, 10**9), min_size=2),
)
def test_the_busy_time_before_an_instant(uses: list[tuple[int, int]], edges: list[int]) -> None:
    spans = [(start, start + duration) for start, duration in uses]
    expected = [sum(max(0, min(edge, end) - start) for start, end in spans) for edge in edges]
    assert list(busy_until(spans, np.array(edges, dtype=float))) == pytest.approx(expected)


def test_pictures(results: list[Result], tmp_path: Path) -> None:
    plot.timeline(results, tmp_path / "timeline.png")
    plot.bars([("unfused", results[0]), ("fused", results[1])], tmp_path / "bars.png")
    for name in ("timeline", "bars"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="must be a PNG, SVG or PDF file that can be written"):
        plot.bars([("unfused", results[0])], tmp_path / "nowhere" / "bars.png")


@pytest.mark.parametrize(
    ("kind", "model", "streams"),
    [("transformer", "llama3-70b", "all_reduce"), ("moe", "mixtral-8x7b", "all_to_all")],
)
def test_pictures_of_one_layer(kind: str, model: str, streams: str, tmp_path: Path) -> None:
    """Tasks of one layer and one microbatch follow one another; fused, no stream of the library is
    left. A step of many layers has shares of time in place of bars.
    """
    options = {"tensor": 8} if kind == "transformer" else {}
    both = [
        Scenario(kind, model, "h100-cluster", 2, fused=fused, pipeline=1, **options).simulate()
        for fused in ("none", "both")
    ]
    assert all(plot.has_layers(result) for result in both)
    found = [windows(result) for result in both]
    assert found[0][0] == found[1][0] > 0
    for (_, passes), rows in zip(found, ({"compute", streams}, {"compute"}), strict=True):
        assert [window.title for window in passes] == ["forward", "backward"]
        for window in passes:
            assert {span.row for span in window.spans} == rows
            times = [window.start_ns]
            for span in window.spans:
                assert span.start_ns == times[-1]
                times.append(span.end_ns)
            assert times[-1] == window.end_ns
            assert not re.search(r"l\d", " ".join(span.name for span in window.spans))
    plot.layer(both, tmp_path / "layer.png")
    plot.timeline(both, tmp_path / "timeline.svg")
    assert (tmp_path / "layer.png").read_bytes().startswith(PNG)
    assert "compute, share of time" in (tmp_path / "timeline.svg").read_text(encoding="utf-8")


def test_one_gpu_of_a_machine_says_so() -> None:
    done = command(
        "run", "moe", "--model", "mixtral-8x7b", "--machine", "h200-node-8", "--nodes", 1
    )
    assert "1 GPU, switch:1" in done.output
    assert "a node of this machine is one GPU" in re.sub(r"\s+", " ", done.output)
    listed = re.sub(r"\s+", " ", command("presets").output)
    assert "h100-cluster (8 GPUs per node), h100-node, h200-cluster (8 GPUs per node)" in listed


def test_the_examples_of_the_package_run() -> None:
    """Every block of Python in its docstring."""
    import interlace_sim as sim

    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", sim.__doc__ or "")
    assert len(blocks) == 2
    for block in blocks:
        exec(textwrap.dedent(block), {})
    assert all(getattr(sim, name) is not None for name in sim.__all__)


# Sweeps.


def test_sweep_is_cartesian_cached_and_the_same_in_parallel(tmp_path: Path) -> None:
    base = Scenario("dlrm", fused="both")
    parameters = {"nodes": [4, 8], "machine.network.latency_ns": [100, 700]}
    first = sweep(base, parameters, workers=1, cache_folder=tmp_path)
    assert [tuple(point.parameters.values()) for point in first] == [
        (4, 100),
        (4, 700),
        (8, 100),
        (8, 700),
    ]
    assert not any(point.cached for point in first)
    again = sweep(base, parameters, workers=1, cache_folder=tmp_path)
    assert all(point.cached for point in again)
    assert [dataclasses.replace(point, cached=False) for point in again] == first
    assert sweep(base, parameters, workers=2, cache_folder=None) == first
    lines = to_csv(first).splitlines()
    assert lines[0].startswith("nodes,machine.network.latency_ns,total_ns")
    assert len(lines) == 5


def test_a_memory_that_cannot_be_used_is_not_used(tmp_path: Path) -> None:
    base, one = Scenario("collective", size=4096), {"nodes": [4]}
    first = sweep(base, one, workers=1, cache_folder=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    for content in ("[" * 100_000, "[]", '{"total_ns": 1}', whole.replace("events", "e")):
        file.write_text(content)
        assert sweep(base, one, workers=1, cache_folder=tmp_path) == first
    # Nobody can write there, not even root.
    assert sweep(base, one, workers=1, cache_folder=Path("/proc")) == first


def test_a_combination_that_cannot_be_run_does_not_stop_the_others(tmp_path: Path) -> None:
    points = sweep(Scenario("dlrm"), {"nodes": [4], "topology": ["switch", "torus:3x3"]}, workers=1)
    assert points[0].total_ns > 0
    assert "got 9 for 4" in points[1].error


def test_a_changed_model_file_is_run_again(tmp_path: Path) -> None:
    from interlace_sim.machine import find

    file = tmp_path / "model.yaml"
    text = find("dlrm", "mlperf").read_text(encoding="utf-8")
    file.write_text(text)
    base = Scenario("dlrm", model=str(file), nodes=4)
    sweep(base, {"slices": [1]}, workers=1, cache_folder=tmp_path / "cache")
    file.write_text(text.replace("value: 26", "value: 52"))
    assert not sweep(base, {"slices": [1]}, workers=1, cache_folder=tmp_path / "cache")[0].cached


def test_sweep_rejections() -> None:
    with pytest.raises(ConfigError, match=r"a parameter must be one of fused, .*; got 'speed'"):
        sweep(Scenario("dlrm"), {"speed": [1]})
    with pytest.raises(ConfigError, match="parameter nodes must have values"):
        sweep(Scenario("dlrm"), {"nodes": []})
    with pytest.raises(ConfigError, match="must be NAME=VALUE,VALUE; got 'nodes'"):
        parse_parameter("nodes")
    assert parse_parameter("all-to-all=ring,direct") == ("all_to_all", ["ring", "direct"])
    assert parse_parameter("model.unpack=true,false") == ("model.unpack", [True, False])


def test_a_parameter_of_a_sweep_is_given_once() -> None:
    done = command("sweep", "dlrm", "--param", "nodes=4", "--param", "nodes=8", code=1)
    assert "must be given once; got nodes twice" in " ".join(done.output.split())


# Calibration.


def made_up_products() -> list[dict[str, float]]:
    """Times of a machine with 0.6 of 989 TFLOP/s, 0.7 of 4.8 TB/s, 5 us, and a norm of 3; with a
    ripple of 2 %.
    """
    out = []
    for number, (m, n, k) in enumerate(
        [
            (m, n, k)
            for m in (128, 1024, 8192)
            for n in (1024, 4096, 16384)
            for k in (1024, 4096, 16384)
        ]
    ):
        compute, memory = (
            2 * m * n * k / 989e12 / 0.6 * 1e6,
            2 * (m * k + n * k + m * n) / 4.8e12 / 0.7 * 1e6,
        )
        time = 5 + (compute**3 + memory**3) ** (1 / 3)
        out.append({"m": m, "n": n, "k": k, "us": time * (1 + 0.02 * math.sin(number))})
    return out


def test_a_fit_finds_the_machine_behind_the_times(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    collectives = [
        {"op": op, "gpus": 8, "bytes": size, "us": 8 + 0.7 * steps + factor * size / 380e3 / share}
        for op, steps, factor, share in (
            ("all_reduce", 14, 14 / 8, 0.9),
            ("alltoall", 1, 7 / 8, 0.75),
        )
        for size in (2**i for i in range(12, 29))
    ]
    file.write_text(json.dumps({"any_gemm": made_up_products(), "any_nccl": collectives}))
    products, timings = calibrate.read_measurements([file])
    fit = calibrate.fit_products(products, 989e12, 4.8e12)
    norm = fit.values["roofline_norm"]
    expected = {
        "flops_efficiency": 0.6,
        "memory_efficiency": 0.7,
        "kernel_ns": 5000,
        "roofline_norm": norm,
    }
    assert fit.values == pytest.approx(expected, rel=0.1)
    assert 2 < norm < 6  # few points have both parts alike, and those ripple
    assert fit.held_out == 6
    assert fit.mean_error < 0.03
    fit = calibrate.fit_collectives(timings, 380e9)
    assert fit.values["efficiency_of.all_reduce"] == pytest.approx(0.9, rel=0.02)
    assert fit.values["launch_ns"] == pytest.approx(8000, rel=0.1)
    assert fit.mean_error < 0.02
    out = tmp_path / "machine.yaml"
    command("calibrate", file, "--yaml", out, "--name", "mine")
    made = load_machine(str(out))
    assert made.name == "mine"
    assert "held-out" in made.note
    assert made.collectives.library_efficiency("all_to_all") == pytest.approx(0.75, rel=0.02)
    assert made.gpu.kernel_ns.confidence == "measured"
    assert made.gpu.profile is None  # which would time products instead of what was fitted
    assert made.collectives.reduction.value == 0
    largest = Task("c", "c", Collective("all_reduce", "ring", 2**28))
    ours = run(made, made.build_topology(8), [largest]).total_ns / 1e3
    assert ours == pytest.approx(
        collectives[16]["us"], rel=0.05
    )  # the machine file says what was measured
    assert Scenario("dlrm", machine=str(out), nodes=4).simulate().total_ns > 0


def test_our_own_benchmarks_are_read() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    products, timings = calibrate.read_measurements(sorted(folder.glob("*gemv_all_reduce*.json")))
    assert len(products) >= 8
    assert not timings
    fit = calibrate.fit_products(products, 989e12, 4.8e12)
    assert fit.median_error < 0.05


def test_third_party_measurements() -> None:
    """512 products and 252 collectives on H200, where the file is at hand: about 10 % on points not
    seen.
    """
    file = Path(__file__).parents[3] / "shared" / "data" / "h200_gemm_nccl_measurements.json"
    if not file.exists():
        pytest.skip("needs h200_gemm_nccl_measurements.json beside the repository")
    products, timings = calibrate.read_measurements([file])
    assert calibrate.fit_products(products, 989e12, 4.8e12).mean_error < 0.10
    eight = [timing for timing in timings if timing.gpus == 8]
    assert calibrate.fit_collectives(eight, 380e9).mean_error < 0.15


def test_calibration_rejections(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"x": [{"m": 1, "n": 1, "k": 1, "us": 1}] * 3}))
    with pytest.raises(ConfigError, match="at least 8 matrix products; got 3"):
        calibrate.fit_products(calibrate.read_measurements([file])[0], 1e12, 1e12)
    file.write_text("{}")
    with pytest.raises(
        ConfigError, match="must have lists of m, n, k, us or of op, gpus, bytes, us"
    ):
        calibrate.read_measurements([file])


def test_minimise() -> None:
    found = calibrate.minimise(
        lambda x: float((x[0] - 3) ** 2 + 10 * (x[1] + 1) ** 2), np.array([0.0, 0.0])
    )
    assert found == pytest.approx([3, -1], abs=1e-3)


# The study.


def test_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of it, as a user would run it: files, and the paper's figure inside the range."""
    monkeypatch.setattr(reproduce, "NETWORKS", reproduce.NETWORKS[:1])
    monkeypatch.setattr(reproduce, "ASSUMPTIONS", reproduce.ASSUMPTIONS[2:4])
    monkeypatch.setattr(
        reproduce.sc24, "__kwdefaults__", {"workers": 1, "cache_folder": None, "nodes": (2, 4, 8)}
    )
    done = command("study", "sc24", "--out", tmp_path, "--workers", "1", "--no-cache")
    assert "Paper (SC24, ASTRA-sim, 128 nodes): up to 21 %." in done.output
    assert "lies inside" in " ".join(done.output.split())
    document = json.loads((tmp_path / "sc24.json").read_text())
    low, high = document["range"]["forward"]
    assert low < 21 < high
    for row in document["networks"]:
        cells = f"{row['unfused_ms']:.1f} ms", f"{row['forward']:.1f} %", f"{row['both']:.1f} %"
        assert _has_row(done, *cells)
    assert ["2-D torus 8x16", "per_dimension", "forward"] in [
        match[:3] for match in document["matches"]
    ]
    for name in ("tornado", "tornado-both", "tornado-per_dimension", "nodes", "networks"):
        assert (tmp_path / f"sc24-{name}.png").read_bytes().startswith(PNG)


# Commands.


def test_dlrm_command(tmp_path: Path) -> None:
    files = {name: tmp_path / f"d.{name}" for name in ("json", "csv", "png", "trace")}
    done = command(
        "run",
        "dlrm",
        "--nodes",
        8,
        "--topology",
        "torus:2x4",
        "--set",
        "model.tables=1024",
        "--json",
        files["json"],
        "--csv",
        files["csv"],
        "--plot",
        files["png"],
        "--trace",
        files["trace"],
    )
    assert "Critical path:" in done.output
    document = json.loads(files["json"].read_text())
    assert document["scenario"]["model_changes"] == [["tables", 1024]]
    assert document["comparison"].keys() == {"none", "forward", "both"}
    assert document["comparison"]["both"]["saved_percent"] > 0
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert (tmp_path / "d-bars.png").exists()
    assert not (tmp_path / "d-layer.png").exists()  # a DLRM has no layers that are alike


@pytest.mark.parametrize(
    "arguments",
    [
        (
            "run",
            "transformer",
            "--nodes",
            2,
            "--tensor",
            8,
            "--pipeline",
            1,
            "--set",
            "model.layers=2",
            "--set",
            "model.microbatches=2",
        ),
        (
            "run",
            "moe",
            "--nodes",
            2,
            "--model",
            "deepspeed-1.3b-moe128",
            "--set",
            "model.layers=1",
            "--fused",
            "forward",
        ),
        ("run", "all_reduce", "--size", "1MiB", "--nodes", 8),
        ("presets",),
        ("presets", "sc24-torus"),
    ],
)
def test_commands(arguments: tuple[Any, ...]) -> None:
    assert command(*arguments).output


def test_a_preset_becomes_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    command("presets", "sc24-torus", "--yaml", file)
    command("run", "all_reduce", "--size", "1MiB", "--nodes", 4, "--machine", file)


def test_collective_command_shows_every_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    done = command(
        "run",
        "all_to_all",
        "--nodes",
        16,
        "--size",
        "1MiB",
        "--json",
        file,
        "--plot",
        tmp_path / "c.png",
    )
    assert "Bound by the bisection." in done.output
    results = json.loads(file.read_text())["results"]
    assert list(results) == ["one_shot", "direct", "per_dimension", "ring"]
    done = command("run", "all_reduce", "--nodes", 16)
    assert "halving_doubling was not run" in " ".join(done.output.split())


def _has_row(done: CliResult, *cells: str) -> bool:
    """Return whether a table has these cells, regular expressions, next to each other."""
    return re.search(r" +".join(cells), done.output) is not None


def test_sweep_command(tmp_path: Path) -> None:
    done = command(
        "sweep",
        "dlrm",
        "--param",
        "nodes=4,8",
        "--param",
        "all_to_all=one_shot,ring",
        "--workers",
        1,
        "--cache",
        tmp_path / "cache",
        "--csv",
        tmp_path / "s.csv",
        "--json",
        tmp_path / "s.json",
        "--plot",
        tmp_path / "s.png",
    )
    assert "4 points, 0 of them remembered" in done.output
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)
    points = json.loads((tmp_path / "s.json").read_text())["points"]
    assert len(points) == 4
    for point in points:
        times = [format_ns(point[name]) for name in ("total_ns", "exposed_ns", "bound_ns")]
        saved = f"{point['saved_percent']:.1f} %"
        assert _has_row(done, str(point["parameters"]["nodes"]), r"\w+", *times, saved)


def test_validate_command(tmp_path: Path) -> None:
    document = json.loads(packaged_cases().read_text())
    file = tmp_path / "cases.json"
    file.write_text(
        json.dumps(
            {"collectives": document["collectives"][:3], "overlap": document["overlap"][-2:]}
        )
    )
    done = command("validate", "--cases", file, "--out", tmp_path)
    assert "exact to the nanosecond, largest error 0.0000 %" in " ".join(done.output.split())
    assert (tmp_path / "validate.png").read_bytes().startswith(PNG)
    assert len((tmp_path / "validate.csv").read_text().splitlines()) == 1 + 3 * 2 + 2 * 3
    file.write_text(json.dumps({"collectives": [{**document["collectives"][0], "time_ns_max": 5}]}))
    assert "FAILED" in command("validate", "--cases", file, "--out", tmp_path, code=1).output
    # A case that cannot run has no figures, none is exact, and there is nothing to draw.
    file.write_text(json.dumps({"collectives": [{**document["collectives"][0], "npus": 3}]}))
    done = command("validate", "--cases", file, "--out", tmp_path / "none", code=1)
    text = " ".join(done.output.split())
    assert "was not run:" in text
    assert "0 of 1 figures within tolerance" in text
    assert "exact" not in text
    names = sorted(path.name for path in (tmp_path / "none").iterdir())
    assert names == ["validate.csv", "validate.json"]
    (case,) = json.loads((tmp_path / "none" / "validate.json").read_text())
    assert (case["error"], case["passed"]) == (None, False)


def test_run_takes_the_traces_that_a_run_writes(tmp_path: Path) -> None:
    pytest.importorskip("chakra")
    prefix = tmp_path / "step"
    command("run", "dlrm", "--nodes", 4, "--chakra", prefix)
    network, system = tmp_path / "net.yml", tmp_path / "sys.json"
    network.write_text("topology: [Switch]\nnpus_count: [4]\nbandwidth: [25]\nlatency: [700]\n")
    system.write_text(json.dumps({"endpoint-delay": 10, "all-to-all-implementation": ["direct"]}))
    files = ("--network-configuration", network, "--system-configuration", system)
    step = ("run", prefix, *files)
    outcome = tmp_path / "out.json"
    done = command(*step, "--json", outcome, "--trace", tmp_path / "trace.json")
    rows = {
        e["args"]["name"]
        for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert rows == {"compute", "communication"}
    assert "4 NPUs" in done.output
    aware = json.loads(outcome.read_text())
    assert 0 < aware["bound_ns"] <= aware["end_ns"][0]
    assert not aware["unphysical"]
    assert f"Physical bound: {aware['bound_ns']} ns, by {aware['bound_reason']}. Not in it: " in (
        " ".join(done.output.split())
    )
    assert len(aware["not_in_bound"]) == 3
    assert len(set(aware["end_ns"])) == 1
    command(*step, "--congestion-unaware", "--json", outcome)
    assert json.loads(outcome.read_text())["end_ns"][0] < aware["end_ns"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "dlrm", "--nodes", "4", "--set", "model.tabels=3"), "tabels must be a known key"),
        (
            ("run", "dlrm", "--nodes", "4", "--set", "tables"),
            "--set must be KEY=VALUE; got 'tables'",
        ),
        (
            ("run", "dlrm", "--topology", "torus:3x3"),
            "topology torus:3x3 must have as many ranks as the run; got 9 for 128",
        ),
        (("run", "broadcast"), "a workload must be one of dlrm, "),
        (
            ("run", "all_reduce", "--size", "many"),
            "Error: size must be a number of bytes; got 'many'",
        ),
        (("sweep", "dlrm", "--param", "nodes=2,few"), "nodes must be a whole number; got 'few'"),
        (("sweep", "dlrm", "--param", "nodes=0"), "nodes must be at least 1; got 0"),
        (("sweep", "all_to_all", "--param", "size=1MiB,few"), "size must be a number of bytes"),
        (("run", "all_reduce", "--size", "0"), "bytes must be at least 1; got 0"),
        (
            ("run", "all_reduce", "--size", "1.5"),
            "size must be a number of bytes; got '1.5'",
        ),
        (
            ("run", "dlrm", "--set", "model.tables=0"),
            "with --set tables: tables must be a whole number of at least 1; got 0",
        ),
        (
            ("run", "dlrm", "--set", "machine.network.latency_ns=-1"),
            "with --set network.latency_ns: network.latency_ns is wrong: value must not be negat",
        ),
        (("compare", str(packaged_cases())), "must have sizes and results.lookups, as benchmarks"),
        (("presets", "nothing"), "a preset must be one of"),
        (
            (
                *("run", "x", "--network-configuration", "none.yml"),
                *("--system-configuration", "none.json"),
            ),
            "none.yml must be a file that can be read",
        ),
        (("run", "x", "--json", "x.json"), "or the prefix of Chakra traces with --network-config"),
        (
            ("run", "dlrm", "--tensor", "8"),
            "--tensor must be given with transformer or t3; got it with dlrm. Leave it out.",
        ),
        (("run", "t3", "--set", "tracker.sets=8"), "--set must change machine.KEY here"),
        (("sweep", "t3", "--param", "nodes=4"), "the workload of a sweep must be one of dlrm, "),
        (("study", "t4"), "a study must be one of sc24, t3, t3-layer, t3-sensitivity; got 't4'"),
        (("study", "sc24", "--pairs"), "--pairs must be given with t3-sensitivity"),
        (("compare", str(packaged_cases()), "--plot", "x.png"), "--plot must be given with bench"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["sim", *arguments])
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_step_says_its_layers_and_its_pipeline(tmp_path: Path) -> None:
    small = ("--nodes", 2, "--tensor", 4, "--pipeline", 2, "--set", "model.layers=4")
    file = tmp_path / "t.json"
    done = command("run", "transformer", *small, "--set", "model.microbatches=3", "--json", file)
    text = " ".join(done.output.split())
    document = json.loads(file.read_text())
    result, layers = document["result"], document["layers"]["both"]
    assert list(layers) == ["l0", "l1", "the rest"]
    assert "layer compute, unfused exposed, unfused compute, fused exposed, fused" in text
    # Layers and the rest add up to the step's computation and exposed time.
    assert sum(layer["compute_ns"] for layer in layers.values()) == result["busy_ns"]["compute"]
    assert sum(layer["exposed_ns"] for layer in layers.values()) == result["exposed_ns"]
    share = f"{100 * result['added_ns'] / result['total_ns']:.0f} % of the step) fused"
    assert "Pipeline of 2 stages (--pipeline), 3 microbatches a step" in text
    assert share in text


def test_sweep_takes_the_options_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    options = ("--model", "mlperf", "--nodes", 4, "--no-cache", "--workers", 1, "--json", file)
    command("sweep", "dlrm", "--param", "slices=2,4", *options)
    scenario = json.loads(file.read_text())["scenario"]
    assert (scenario["model"], scenario["nodes"], scenario["fused"]) == ("mlperf", 4, "both")
    with pytest.raises(ConfigError, match="a collective has no model"):
        Scenario("collective", model="mlperf").simulate()


def test_other_spellings_are_taken(tmp_path: Path) -> None:
    small = ("--shape", "256x256x64", "--topology", "switch", "--tensor", 4)
    file = tmp_path / "t3.json"
    command("run", "t3", *small, "--collective", "all-to-all", "--json", file)
    document = json.loads(file.read_text())["t3"]
    assert (document["ranks"], document["collective"]) == (4, "all_to_all")
    output = command("run", "all-to-all", "--nodes", 4, "--algorithm", "one-shot").output
    assert "all_to_all, 16.8 MB" in output


def words_of_help(name: str) -> str:
    return " ".join(command(name, "--help").output.replace("│", " ").split())


def test_help_shows_defaults() -> None:
    """Of each kind of workload."""
    for name in ("run", "sweep"):
        shown = words_of_help(name)
        for kind, default in DEFAULTS.items():
            for value in default:
                assert not value or re.search(rf"{value} \([^)]*\b{kind}\b", shown), (kind, value)


def test_every_command_has_examples_that_are_parsed() -> None:
    commands = typer.main.get_group(sim_app).commands
    names = ["run", "sweep", "compare", "validate", "calibrate", "study", "presets"]
    assert list(commands) == names
    for name, parsed in commands.items():
        examples = re.findall(rf"^ +interlace sim {name} (.+)$", parsed.help or "", re.MULTILINE)
        assert examples
        for example in examples:
            assert example in words_of_help(name)
            parsed.make_context(name, example.split())


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_takes_the_options_that_are_handed_to_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[inspect.BoundArguments] = []
    signature = inspect.signature(STUDIES[name])
    monkeypatch.setitem(STUDIES, name, lambda **given: done.append(signature.bind(**given)))
    command("study", name, "--out", tmp_path)
    assert len(done) == 1


def test_an_infinite_threshold_is_none() -> None:
    # One tile is one stage, after which no threshold is chosen.
    tile = ("--shape", "1x1x1", "--machine", "t3-h200", "--tensor", 4)
    (threshold,) = (
        line
        for line in command("run", "t3", *tile).output.splitlines()
        if line.startswith("threshold")
    )
    assert threshold.split() == ["threshold", "none"]


def test_help_of_set_names_a_key_that_the_command_has() -> None:
    for name in ("run", "sweep", "compare", "study"):
        assert "Change a value, say machine.network.latency_ns=500" in words_of_help(name)
    for machine in (load_machine("sc24-torus"), load_t3_machine()):
        assert machine.network.latency_ns.value > 0


def test_progress_is_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sim_progress, "INTERVAL_S", 0.05)
    with sim_progress.show_progress("sweep") as runs:
        for number in runs.over([0, 1]):
            deadline = time.monotonic() + 60
            while f"sweep: {number} of 2 runs" not in (text := capsys.readouterr().err):
                assert time.monotonic() < deadline, text
                time.sleep(0.01)
    assert runs.done == 2
    assert capsys.readouterr().out == ""


def test_an_interrupted_sweep_ends(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes; none may go on with the items that wait for it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nimport time\nfrom interlace_sim.sweeps import map_processes\n"
        # A line at once: two processes write to one pipe.
        "def nap(seconds):\n    os.write(1, b'asleep\\n')\n    time.sleep(seconds)\n"
        "if __name__ == '__main__':\n    list(map_processes(nap, [600] * 16, 2))\n"
    )
    process = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "asleep\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) != 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_chakra_files_are_refused_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("chakra")
    prefix = tmp_path / "step"
    done = command("run", "dlrm", "--nodes", 4, "--chakra", prefix)
    assert f"{prefix}.0.et, one file for each rank" in done.output.replace("\n", "")
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"step.{n}.et" for n in range(4)]
    monkeypatch.setattr(Scenario, "simulate", lambda *_: pytest.fail("it was refused too late"))
    done = command("run", "dlrm", "--nodes", 4, "--chakra", tmp_path / "nowhere" / "step", code=1)
    assert "step.0.et must be a file that can be written" in " ".join(done.output.split())


def test_a_long_run_says_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 110.0, 110.0, 110.0, 110.0])
    monkeypatch.setattr(sim_progress.time, "monotonic", lambda: next(clock))
    runs = sim_progress.Runs()
    share = [0.0]
    runs.watch(lambda: share[0])
    said = []
    for share[0] in (0.0, 0.5, 0.01, 0.0001, 1.0):
        said.append(runs.left())
    assert said == [
        "",
        *(f"about {left} left of this one" for left in ("10 s", "16 min", "28 h")),
        "",
    ]
    runs(1, 2)
    monkeypatch.setattr(sim_progress.time, "monotonic", lambda: 110.0)
    assert runs.left() == "", "of the next run nothing is known yet"


@pytest.mark.parametrize("columns", ["80", "40"])
def test_a_narrow_terminal_shows_every_letter(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = command("run", "all_to_all", "--nodes", 16)
    assert "…" not in done.output
    # The first column is as wide as its heading's first line, and names go on below.
    folded = "".join(re.findall(r"^\w+", done.output, re.MULTILINE))
    assert "per_dimension" in folded


def test_no_number_is_a_power_of_ten() -> None:
    values = (0.00001234, 0.01234, 12.34, 999.4, 999.6, 1730.4, 2e9)
    assert [format_number(value) for value in values] == [
        "0.0000123",
        "0.0123",
        "12.3",
        "999",
        "1000",
        "1730",
        "2000000000",
    ]
    assert [format_ns(ns) for ns in (999, 999_700, 1e6, 2e12)] == [
        "999 ns",
        "1000 us",
        "1 ms",
        "2000 s",
    ]
    assert [format_bytes(count) for count in (999, 999_700, 2e15)] == [
        "999 B",
        "1000 KB",
        "2000 TB",
    ]


def test_help_is_quick_and_light() -> None:
    code = (
        "import sys\nfrom interlace.cli import main\nsys.argv = ['interlace', 'sim', 'run', "
        "'--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'triton', 'numpy', 'yaml', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
