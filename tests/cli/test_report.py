"""Tables from benchmark results, and tuned tables: pure functions over JSON."""

from __future__ import annotations

import functools
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.tables import markdown
from interlace import tuning
from interlace.bench import report, tuned
from interlace.cli.app import app
from interlace.errors import ArgumentError

MACHINE = {
    "gpus": ["NVIDIA H200"] * 4,
    "driver": "570.1",
    "cuda": "13.0",
    "torch": "2.13.0",
    "triton": "3.9.0",
    "nccl": "2.30.3",
}


def result(fused: float = 12.0, nccl: float = 30.0, **changes: Any) -> dict[str, Any]:
    times = {
        "fused": fused,
        "cuBLAS + NCCL": nccl,
        "NCCL alone": 19.0,
        "cuBLAS + torch one-shot": 24.0,
        "torch one-shot alone": 8.0,
        "cuBLAS mm alone": 11.5,
        "cuBLAS mv alone": 10.0,
        "our GEMV alone": 10.5,
        "our exchange alone": 5.0,
    }
    pairs = {"cuBLAS + NCCL": "unfused", "cuBLAS + torch one-shot": ""}
    roles = {
        "fused": {"role": "ours", "impl": "fused"},
        **{name: {"role": "pair", "impl": impl} for name, impl in pairs.items()},
        **{name: {"role": "communication"} for name in times if name.endswith("alone")},
        **{name: {"role": "compute"} for name in ("cuBLAS mm alone", "cuBLAS mv alone")},
        "our GEMV alone": {"role": "compute"},
    }
    values = {
        name: {
            **roles[name],
            "median_us": us,
            "p10_us": us - 0.5,
            "p90_us": us + 1,
            "skew_us": 0.25,
            "samples": 15,
        }
        for name, us in times.items()
    }
    sizes = {"rows": 1, "columns": 8192, "inner": 2048}
    shape = " x ".join(str(changes.get(name, size)) for name, size in sizes.items())
    return {
        "operator": "gemv_all_reduce",
        "shape": shape,
        **sizes,
        "dtype": "bfloat16",
        "world_size": 4,
        "config": "one_shot 4 512 4 1 0 0",
        "auto": "fused",
        "relative_error": 1.6e-3,
        "floor_us": 8.0,
        "memory_bytes": 33575936,
        "link_bytes": 24576,
        "times": values,
        **changes,
    }


def test_summary_takes_the_fastest_of_each_kind() -> None:
    summary = report.summarise(result())
    assert summary.unfused == ("cuBLAS + torch one-shot", 24.0)
    assert summary.compute == ("cuBLAS mv alone", 10.0)
    assert summary.communication == ("our exchange alone", 5.0)


def test_summary_needs_every_kind() -> None:
    times = {name: time for name, time in result()["times"].items() if " + " not in name}
    with pytest.raises(
        ArgumentError, match="must have an unfused pair among its times; got fused, "
    ):
        report.summarise(result(times=times))


def test_table_shows_every_time() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.table("gemv_all_reduce", result()))
    text = console.export_text()
    assert "gemv_all_reduce: 1 x 8192 x 2048, bfloat16, 4 ranks" in text
    lines = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in text.splitlines()
        if "│" in line
    }
    assert list(lines)[:2] == ["fused", "cuBLAS + torch one-shot"]
    assert lines["fused"] == ["12.00", "11.50 - 13.00", "0.25", ""]
    assert lines["cuBLAS + NCCL"][3] == "-60 %"
    assert lines["our GEMV alone"][3] == "+14 %"
    assert lines["physical floor"] == ["8.00", "", "", "+50 %"]
    assert len(lines) == len(result()["times"]) + 1


def test_markdown(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    document = {
        "machine": MACHINE,
        "command": "interlace bench",
        "date": "2026-11-20T15:00:00+00:00",
    }
    file.write_text(
        json.dumps({**document, "results": [result(), result(rows=2, world_size=2)]}),
        encoding="utf-8",
    )
    done = CliRunner().invoke(app, ["bench", "table", str(file), str(file)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[2] == (
        "| 1 x 8192 x 2048 | 4 | bfloat16 | **12.0** | 24.0 (cuBLAS + torch one-shot) | -50 % | "
        "10.0 | 1.20 | 8.0 | fused |"
    )
    assert lines[3].startswith("| 2 x 8192 x 2048 | 2 |")
    assert {line.count("|") for line in lines[:6]} == {11}
    assert lines[6:] == [
        "",
        (
            "4 x NVIDIA H200, driver 570.1, CUDA 13.0, PyTorch 2.13.0, Triton 3.9.0, NCCL 2.30.3, "
            "2026-11-20."
        ),
    ]


def test_markdown_shows_the_fastest_of_several_implementations() -> None:
    times = result()["times"]
    times |= {
        "chunked": {**times["fused"], "impl": "chunked", "median_us": 11.0},
        "remote_stores": {**times["fused"], "impl": "remote_stores", "median_us": 13.0},
    }
    text = markdown([{"machine": MACHINE, "results": [result(times=times)]}])
    assert "| Interlace us | best unfused us | Interlace is |" in text
    assert (
        "| **11.0** (chunked) | 24.0 (cuBLAS + torch one-shot) | -54 % "
        "| 10.0 | 1.10 | 8.0 | chunked |" in text
    )


def test_of_two_as_fast_the_one_that_the_host_enqueues_sooner() -> None:
    times = result()["times"]
    times["chunked"] = {**times["fused"], "impl": "chunked", "median_us": 11.9}
    host = {"fused": 100.0, "chunked": 300.0, "cuBLAS + NCCL": 50.0}
    assert report.fastest_impl(result(times=times)) == ("chunked", 11.9)
    assert report.fastest_impl(result(times=times, host_us=host)) == ("fused", 12.0)
    times["chunked"]["median_us"] = 11.7
    assert report.fastest_impl(result(times=times, host_us=host)) == ("chunked", 11.7)


def test_a_role_counts_more_than_a_name() -> None:
    """A name is only what tables show."""
    roles = {
        "fused": ("ours", "fused"),
        "cuBLAS + NCCL": ("pair", "unfused"),
        "NCCL alone": ("communication", ""),
        "our GEMV alone": ("compute", ""),
    }
    named = result()["times"]
    times = {
        f"way {i}": {**named[name], "role": role, "impl": impl}
        for i, (name, (role, impl)) in enumerate(roles.items())
    }
    summary = report.summarise(result(times=times))
    assert (summary.fused_us, summary.unfused) == (12.0, ("way 1", 30.0))
    assert (summary.compute, summary.communication) == (("way 3", 10.5), ("way 2", 19.0))
    assert report.fastest_impl(result(times=times)) == ("fused", 12.0)
    assert tuned.entry(result(times=times))["fused_us"] == 12.0


def test_an_operator_whose_collective_no_library_has() -> None:
    """Its result has no time of the collective alone; all else can be told."""
    named = result()["times"]
    times = {
        "fused": {**named["fused"], "role": "ours", "impl": "fused"},
        "unfused": {**named["cuBLAS + NCCL"], "role": "pair", "impl": "unfused"},
        "cuBLAS alone": {**named["cuBLAS mm alone"], "role": "compute"},
    }
    found = result(times=times)
    table = report.table("gemm_broadcast", found)
    assert table.row_count == 4
    assert "hidden" not in str(table.caption)
    assert "relative error 1.6e-03; configuration" in str(table.caption)
    assert "| **12.0** | 30.0 (unfused) | -60 % |" in markdown(
        [{"machine": MACHINE, "results": [found]}]
    )


def test_markdown_of_a_sweep(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    call = {
        "model": "Some-7B",
        "operator": "gemm_all_reduce",
        "auto": "fused",
        "times": {
            "fused": {"role": "ours", "median_us": 8.0},
            "chunked": {"role": "ours", "median_us": 4.0},
            "unfused": {"role": "pair", "median_us": 10.0},
        },
    }
    other = {**call, "auto": "unfused"}
    document = {"machine": MACHINE, "date": "2026-11-22", "results": [call, other]}
    file.write_text(json.dumps(document), encoding="utf-8")
    done = CliRunner().invoke(app, ["bench", "table", str(file)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[2] == "| `gemm_all_reduce` | 2 | 0.894 | 1.00 | 2.236 | 2.50 |"


def test_not_a_result_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]", encoding="utf-8")
    done = CliRunner().invoke(app, ["bench", "table", str(tmp_path / "x.json")])
    assert done.exit_code == 1
    assert "it lacks machine and results" in done.output


def test_results_that_lack_something_are_no_table(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    for changed in (
        {"machine": 1, "results": []},
        {"machine": {}, "results": [result() | {"times": {"fused": None}}]},
        {"machine": {}, "results": [result() | {"floor_us": math.nan}]},
    ):
        file.write_text(json.dumps(changed))
        done = CliRunner().invoke(app, ["bench", "table", str(file)])
        assert done.exit_code == 1
        assert re.search(f"{file} must be .* that interlace bench wrote; ", done.output), (
            done.output
        )


def test_entry_is_unfused_only_where_what_it_runs_is_faster() -> None:
    assert tuned.entry(result()) == {
        "world_size": 4,
        "dtype": "bfloat16",
        "rows": 1,
        "columns": 8192,
        "inner": 2048,
        "impl": "fused",
        "config": "one_shot 4 512 4 1 0 0",
        "fused_us": 12.0,
        "unfused_us": 24.0,
        "unfused": "cuBLAS + torch one-shot",
    }
    assert (
        tuned.entry(result(fused=26.0))["impl"] == "fused"
    )  # torch's one-shot pair is not what impl="unfused" runs
    assert tuned.entry(result(fused=26.0, nccl=25.0))["impl"] == "unfused"


def test_tables_merge_by_point(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    assert tuned.read(file, "gemv_all_reduce") is None
    first = tuned.merge(
        None, "gemv_all_reduce", MACHINE, [tuned.entry(result(rows=2)), tuned.entry(result())]
    )
    assert [entry["rows"] for entry in first["entries"]] == [1, 2]
    file.write_text(json.dumps(first), encoding="utf-8")
    newer = {**MACHINE, "driver": "580.1"}
    second = tuned.merge(
        tuned.read(file, "gemv_all_reduce"),
        "gemv_all_reduce",
        newer,
        [tuned.entry(result(fused=11.0)), tuned.entry(result(rows=4))],
    )
    assert [(entry["rows"], entry["fused_us"]) for entry in second["entries"]] == [
        (1, 11.0),
        (2, 12.0),
        (4, 12.0),
    ]
    assert second["machine"]["driver"] == "580.1"


def test_tables_of_other_machines_and_operators_are_refused(tmp_path: Path) -> None:
    table = tuned.merge(None, "gemv_all_reduce", MACHINE, [tuned.entry(result())])
    with pytest.raises(
        ArgumentError, match="one kind of GPU; got NVIDIA B200 for a table of NVIDIA H200"
    ):
        tuned.merge(table, "gemv_all_reduce", {"gpus": ["NVIDIA B200"]}, [])
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(ArgumentError, match="must be a tuned table of gemm_all_reduce"):
        tuned.read(file, "gemm_all_reduce")


def test_written_tables_are_what_tuning_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    (tmp_path / "tables").mkdir()
    table = tuned.merge(None, "gemv_all_reduce", MACHINE, [tuned.entry(result())])
    file = tmp_path / "tables" / tuning.file_name("gemv_all_reduce", "NVIDIA H200")
    file.write_text(json.dumps(table), encoding="utf-8")
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    caches = tuning._table, tuning._placed
    for cached in caches:
        cached.cache_clear()
    try:
        point = tuning.Point(
            world_size=4, dtype="bfloat16", sizes={"rows": 1, "columns": 8192, "inner": 2048}
        )
        found = tuning.nearest("gemv_all_reduce", "NVIDIA H200", point)
    finally:
        for cached in caches:
            cached.cache_clear()
    assert found is not None
    assert (found.impl, found.config) == ("fused", "one_shot 4 512 4 1 0 0")
    assert "fused 12.0 us" in found.reason


Answer = Callable[[Any, dict[str, Any]], dict[str, Any]]
"""A function of a shape's sizes and of the options of its measurement; returns a result."""


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[tuple[Any, ...]]]:
    """Two GPUs that are not there: a function that takes the ranks' answer to a shape, and returns
    a list of what they are asked.
    """

    def answer_by(answer: Answer) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def ranks(
            console: Console,
            title: str,
            steps: int,
            worker: Any,
            world_size: int,
            work: list[Any],
            measure: Any,
            budget_s: float,
            header: dict[str, Any],
            file: str | None,
            *,
            backend: str,
        ) -> list[list[dict[str, Any]]]:
            assert (header["machine"], backend, steps) == (MACHINE, "cuda", len(work))
            asked.append((world_size, work, measure.keywords))
            return [[answer(sizes, measure.keywords) for sizes in work]] * world_size

        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        monkeypatch.setattr("interlace.cli.machine.describe", lambda: MACHINE)
        monkeypatch.setattr("interlace.cli.bench.run_ranks", ranks)
        return asked

    return answer_by


@pytest.fixture
def measured(measuring: Callable[[Answer], list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Ranks that have measured a product of a few tokens; what they were asked."""
    names = "rows", "columns", "inner"
    return measuring(lambda sizes, _: result(**dict(zip(names, sizes, strict=True))))


def test_bench_writes_what_table_reads(measured: list[tuple[Any, ...]], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [
        "bench",
        "gemv_all_reduce",
        "--tokens",
        "1,4",
        "--shape",
        "64x32",
        "--shape",
        "16x8",
        "--json",
        str(file),
        "--tune",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert measured == [
        (
            2,
            [(1, 64, 32), (4, 64, 32), (1, 16, 8), (4, 16, 8)],
            {"dtype": "bfloat16", "tunes": True},
        )
    ]
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document.keys() == {"machine", "command", "date", "results"}
    assert document["machine"] == MACHINE
    assert done.output.count("physical floor") == 4
    assert markdown([document]).count("| 4 x 16 x 8 |") == 1


def test_tune_extends_its_table(measured: list[tuple[Any, ...]], tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    for tokens in ("1,2", "2,4"):
        done = CliRunner().invoke(
            app,
            [
                "tune",
                "gemv_all_reduce",
                "--tokens",
                tokens,
                "--shape",
                "64x32",
                "--table",
                str(file),
            ],
        )
        assert done.exit_code == 0, done.output
    table = json.loads(file.read_text(encoding="utf-8"))
    assert table["operator"] == "gemv_all_reduce"
    assert [entry["rows"] for entry in table["entries"]] == [1, 2, 4]
    assert "gemv_all_reduce.nvidia_h200.json" in done.output


def test_what_was_measured_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails at the second shape leaves the first one's result in the file."""
    from benchmarks import gemv_all_reduce as operator
    from interlace.cli import ranks

    def bench(shape: operator.GemvShape, config: object) -> dict[str, Any]:
        if shape.rows == 2:
            raise ArgumentError("the second shape fails")
        return result(rows=shape.rows)

    monkeypatch.setattr(operator, "bench", bench)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    file = tmp_path / "results.json"
    with pytest.raises(ArgumentError, match="second shape"):
        ranks.measure_shapes(
            str(tmp_path),
            [(1, 64, 32), (2, 64, 32)],
            functools.partial(operator.measure, dtype="bfloat16", tunes=False),
            math.inf,
            {"machine": MACHINE},
            str(file),
        )
    assert (
        markdown([json.loads(file.read_text(encoding="utf-8"))]).count("| 1 x 8192 x 2048 |") == 1
    )


def test_shapes_of_embeddings(measuring: Callable[[Answer], list[tuple[Any, ...]]]) -> None:
    """Each shape is measured with each number of lookups, in the direction that is asked for."""
    named = {"operator": "embedding_all_to_all", "shape": "2 x 9 x 8, B = 6"}
    asked = measuring(lambda sizes, _: {**result(), **named, **sizes})
    options = ("--shape", "2x9x8", "--lookups", "1,0-4", "--batch", "6", "--backward")
    done = CliRunner().invoke(app, ["bench", "embedding_all_to_all", *options])
    assert done.exit_code == 0, done.output
    shape = {"tables": 2, "rows": 9, "width": 8, "batch": 6}
    work = [{**shape, "lookups": lookups} for lookups in ("1", "0-4")]
    assert asked == [(2, work, {"dtype": "float32", "kind": "backward"})]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "64x200000"], "a shape must be TxNxD"),
        (["--lookups", "1,9-3"], "--lookups must be numbers or ranges"),
        (["--dtype", "int8"], "--dtype must be one of"),
    ],
)
def test_bad_options_of_embeddings(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "embedding_all_to_all", *options])
    assert done.exit_code == 1
    assert message in done.output


def test_embedding_results_make_tables_and_entries(tmp_path: Path) -> None:
    sizes = {"tables": 64, "width": 256, "batch": 4096, "pooling_factor": 32}
    named = {
        "operator": "embedding_all_to_all",
        "shape": "64 x 200000 x 256, B = 4096, L = 20",
        **sizes,
    }
    roles = {
        "fused": {"role": "ours", "impl": "fused"},
        "F.embedding_bag + NCCL + unpack": {"role": "pair", "impl": "unfused"},
        "our bags + NCCL": {"role": "pair"},
        "our bags alone": {"role": "compute"},
        "NCCL alone": {"role": "communication"},
    }
    measured = {
        name: {**role, "median_us": 100.0, "p10_us": 100.0, "p90_us": 100.0, "skew_us": 1.0}
        for name, role in roles.items()
    }
    found = {**result(), **named, "times": measured}
    assert report.shape(found) == named["shape"]
    assert "| shape a rank |" in markdown([{"machine": MACHINE, "results": [found]}])
    assert report.summarise(found).hidden_percent == 100.0
    # On one rank.
    measured["NCCL alone"]["median_us"] = 0.0
    assert math.isnan(report.summarise(found).hidden_percent)
    table = tuned.merge(None, "embedding_all_to_all", MACHINE, [tuned.entry(found)])
    assert {name: table["entries"][0][name] for name in sizes} == sizes
