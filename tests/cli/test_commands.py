"""The command line: what it prints, its exit codes, and that it stays quick to start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest
import torch
from rich.table import Table
from typer.testing import CliRunner, Result

import interlace
from interlace.cli import doctor, operator_commands, scripts
from interlace.cli.app import app
from interlace.cli.console import make_console
from interlace.cli.gpus import gpu_named
from interlace.cli.outputs import Outputs
from interlace.costs.known_profiles import profile_of
from interlace.registry import operator_named

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_help_does_not_import_torch() -> None:
    code = """
import sys
from interlace.cli import main
sys.argv = ["interlace", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
for module in ("torch", "triton", "matplotlib", "numpy"):
    assert module not in sys.modules, module
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    for command in ("doctor", "demo", "bench", "tune"):
        assert command in done.stdout


def test_explain_needs_no_gpu() -> None:
    done = run("explain", "gemm_reduce_scatter", "8192x8192x2048", "6001x5120x2560", "-n", 4)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == "gemm_reduce_scatter of 8192 x 8192 x 2048, bfloat16, 4 ranks, NVIDIA H200"
    assert lines[2].split()[0] == "chunked", "the fastest first"
    assert "unfused (PyTorch's)" in done.output
    memory = dict(re.findall(r"^(\w+) .*?(\d+ MiB|none) ", done.output, re.MULTILINE))
    # Parts of the last call, 6001 x 5120 in bfloat16, in one set of slots or in two.
    assert memory == {
        "chunked": "62 MiB", "fused": "122 MiB", "unfused": "none", "async_tp": "none",
    }  # fmt: skip
    rows = re.findall(r"^(\S+).* (\d+) +(\d\.\d\d) *$", done.output.split("6001")[0], re.MULTILINE)
    (best_us,) = (int(us) for _, us, ratio in rows if ratio == "1.00")
    assert len({ratio for *_, ratio in rows}) > 2
    for name, us, ratio in rows:
        assert float(ratio) == pytest.approx(int(us) / best_us, abs=0.01), name
    assert "remote_stores" not in done.output.split("6001")[1], "which takes even rows only"
    assert "Predicted, not measured: " in done.output


def test_what_is_piped_is_not_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file and a pipe have no width: names, headings, titles and captions stay in one piece."""
    monkeypatch.delenv("COLUMNS", raising=False)
    # Nothing in brackets or between colons is markup.
    file = tmp_path / f"{'a-long-name-' * 12}[red]:x:.json"
    done = run("sim", "run", "all_to_all", "--size", "1MiB", "--json", file)
    lines = done.output.splitlines()
    assert done.exit_code == 0
    assert any(line.startswith("Written: ") and line.endswith(str(file)) for line in lines)
    assert sum(line.startswith("per_dimension ") for line in lines) == 1
    table = Table("one", title="a title " * 20, caption="a caption " * 20)
    make_console().print(table)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].strip() == ("a title " * 20).strip()
    assert printed[-1].strip() == ("a caption " * 20).strip()
    monkeypatch.setenv("COLUMNS", "60")
    assert make_console().width == 60


def test_explain_takes_what_auto_takes() -> None:
    """Products of float32 run without tensor cores, by rates of the profile that are their own."""
    products = []
    for dtype in ("bfloat16", "float32"):
        done = run("explain", "gemm_all_to_all", "8192x8192x2048", "--dtype", dtype)
        assert done.exit_code == 0
        assert f"8192 x 8192 x 2048, {dtype}, 4 ranks" in done.output
        line = next(line for line in done.output.splitlines() if "the product alone" in line)
        products.append(int(line.split()[-1]))
    profile = profile_of("NVIDIA H200").product
    slower = profile.flops_per_s / profile.float32_flops_per_s
    assert products[1] == pytest.approx(slower * products[0], rel=0.15)
    assert run("explain", "gemm_all_to_all", "8x8x8", "--dtype", "float64").exit_code == 1


def test_explain_takes_an_exact_entry_of_the_table_as_a_call_does(tmp_path: Path) -> None:
    """Of few rows the kernel's table says what is fastest, where no time of it is predicted."""
    file = tmp_path / "explained.json"
    sizes = {"rows": 64, "columns": 8192, "inner": 7168}
    exact, other = "64x8192x7168", "48x8192x7168"
    done = run("explain", "gemm_all_reduce", exact, other, "--gpu", "h200", "-n", 4, "--json", file)
    assert done.exit_code == 0, done.output
    first, second = json.loads(file.read_text(encoding="utf-8"))["calls"]
    choice = operator_named("gemm_all_reduce").choose(
        **sizes, dtype=torch.bfloat16, world_size=4, device=gpu_named("h200")
    )
    assert choice.is_exact
    assert choice.impl == first["impl"] == next(iter(first["times_us"])) == "gemv"
    assert first["times_us"]["gemv"] == choice.table_us
    said = " ".join(done.output.split())
    assert said.count("impl='auto' takes gemv: measured on NVIDIA H200 at 4 ranks, bfloat16") == 1
    assert f"gemv {choice.table_us} us, best unfused pair" in said
    assert "gemv" not in second["times_us"]
    assert second["impl"] == next(iter(second["times_us"]))


def test_explain_guesses_by_data_sheets() -> None:
    """A card of PCIe has slow links: what hides behind them counts for more."""
    shape = "gemm_reduce_scatter", "8192x8192x2048", "-n", 4
    slow = run("explain", *shape, "--gpu", "NVIDIA H100 PCIe")
    fast = run("explain", *shape, "--gpu", "h800")
    assert slow.exit_code == fast.exit_code == 0
    links = [
        int(next(line.split()[-1] for line in done.output.splitlines() if "links alone" in line))
        for done in (slow, fast)
    ]
    assert links[0] == pytest.approx(200 / 64 * links[1], rel=0.02)
    assert "a guess: NVIDIA H100 80GB HBM3's, scaled by both data sheets" in " ".join(
        slow.output.split()
    )
    assert run("explain", *shape, "--gpu", "NVIDIA L4").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embedding_all_to_all", "1x1x1"], "one around one product, such as all_gather_gemm, "),
        (
            ["gemm_all_reduce", "8x8x8", "--gpu", "a100-sxm"],
            "must name one of NVIDIA A100-SXM4-40GB, NVIDIA A100-SXM4-80GB; got 'a100-sxm', which "
            "is a part of each of these names.",
        ),
        (["gemm_all_reduce", "8x8x8", "--gpu", "voodoo"], "NVIDIA H200, NVIDIA H800"),
        (
            ["gemm_all_reduce", "8x8x8", "--gpu", "voodoo"],
            "; got 'voodoo'. `interlace tune machine",
        ),
        (["gemm_all_reduce", "8x8"], "must be MxNxK"),
        (["gemm_all_reduce", "8x8x8", "--nodes", "5"], "--nodes must be at most the 4 ranks"),
    ],
)
def test_what_explain_refuses(arguments: list[str], message: str) -> None:
    done = run("explain", *arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("command", "default"),
    [
        (("bench", "gemv_all_reduce"), "seven"),
        (("bench", "mixture_of_experts"), "two"),
        (("tune", "gemm_all_reduce"), "eight"),
        (("sim", "run"), "the machine's"),
        (("sim", "validate"), "those of the package"),
    ],
)
def test_help_shows_defaults_in_words(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], default: str
) -> None:
    """In brackets, which are markup unless they are escaped."""
    monkeypatch.setenv("COLUMNS", "200")
    done = run(*command, "--help")
    assert done.exit_code == 0, done.output
    assert f" [default: {default}]" in " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())


def test_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "interlace", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"interlace {interlace.__version__}\n"


def test_a_full_disk_behind_a_pipe_is_one_line() -> None:
    words = [sys.executable, "-m", "interlace", "sim", "presets"]
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    message = "Error: nothing more can be written; no space is left on the disk.\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_terminal_without_a_width_and_streams_that_are_closed(
    closed: str, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    words = f"{sys.executable} -m interlace sim run all_to_all --nodes 2 --json {file} {closed}"
    done = subprocess.run(
        ["sh", "-c", words], env=os.environ | {"COLUMNS": "0"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Written: {file}" in done.stdout or closed == ">&-"
    assert json.loads(file.read_text(encoding="utf-8"))["results"]


def test_doctor(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    done = run("doctor", "--json", file)
    assert done.exit_code == 0, done.output
    document = json.loads(file.read_text(encoding="utf-8"))
    checks = {row["check"]: row for row in document["checks"]}
    assert document["usable"][0] == "cpu"
    assert (
        checks["backend cpu"]["status"]
        == checks["torch"]["status"]
        == checks["shared memory"]["status"]
        == "ok"
    )
    assert document["machine"]["torch"] == torch.__version__
    assert {row["status"] for row in document["checks"]} <= {"ok", "missing", "not here"}
    assert all(row["action"] for row in document["checks"] if row["status"] == "missing")


def test_doctor_says_what_the_limit_of_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not set" in doctor.check_limit().meaning
    monkeypatch.setenv("INTERLACE_MAX_WORKSPACE", "768M")
    row = doctor.check_limit()
    assert row.status == "ok"
    assert row.meaning.startswith("768 MiB of symmetric memory per rank and group")
    assert row.meaning.endswith("a row for each running program says what its operators hold")
    monkeypatch.setenv("INTERLACE_MAX_WORKSPACE", "much")
    assert doctor.check_limit().status == "missing"


def test_doctor_knows_which_numpy_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3.6.0", "numpy": "2.4.1"}
    monkeypatch.setattr(
        "interlace.cli.machine.package_version", lambda name: versions.get(name, "")
    )
    rows = {row.check: row for row in doctor.check_all()}
    assert rows["numpy"].status == rows["backend cpu"].status == "missing"
    assert "numpy<2.4" in rows["numpy"].action
    versions["numpy"] = "2.3.5"
    assert {row.check: row for row in doctor.check_all()}["backend cpu"].status == "ok"


def test_doctor_fails_where_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [doctor.Row("torch", "missing", "not installed", "pip install torch")]
    verdicts = [
        doctor.Row(f"backend {name}", "missing", "not usable for want of: torch")
        for name in ("cpu", "cuda")
    ]
    monkeypatch.setattr(doctor, "check_all", lambda: [*rows, *verdicts])
    done = run("doctor")
    assert done.exit_code == 1
    assert "No backend is usable" in done.output


@pytest.mark.usefixtures("quick_launches")
def test_demo(tmp_path: Path) -> None:
    file, plot = tmp_path / "demo.json", tmp_path / "demo.png"
    done = run("demo", "--world-size", 2, "--backend", "cpu", "--json", file, "--plot", plot)
    assert done.exit_code == 0, done.output
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["passed"]
    assert document["machine"]["torch"] == torch.__version__
    assert [model["name"] for model in document["models"]] == [
        "Llama-3-8B",
        "Qwen2.5-32B",
        "Llama-3-70B",
    ]
    for model in document["models"]:
        assert 0 < model["error"] < model["tolerance"] < 0.01
        for rank in model["ranks"]:
            assert rank["counted"] == rank["predicted"]
            assert (
                rank["counted"]["bytes"] == 8 * model["rows_run"]
            )  # a packed word an output, to one peer
    _check_dlrm(document["dlrm"])
    mapped = document["mapped"]
    assert mapped["passed"]
    assert [rank["bytes"] for rank in mapped["ranks"]] == [
        512 * 1024 * 4
    ] * 2  # the half that is for the other rank
    recorded = document["models"][-1]["ranks"]
    for rank in recorded:
        order = {}
        for kind, steps in rank["steps"].items():
            assert {peer for activity, peer in steps if activity == "put"} == {1 - rank["rank"]}
            order[kind] = [activity for activity, _ in steps]
            assert order[kind].count("put") == rank["counted"]["puts"]
        assert sorted(order["fused"]) == sorted(order["unfused"])
        tiles = order["fused"].count("compute")
        assert order["unfused"][:tiles] == ["compute"] * tiles
        assert order["fused"].index("put") < tiles  # between two of its tiles
    assert plot.read_bytes().startswith(PNG)
    assert done.output.count("fused    rank") == 2
    assert "Unfused, the same work in two steps: 0 of 32 puts leave before" in done.output
    assert not re.search(r"\d (ms|us|ns|s)\b", done.output)  # no times of the interpreter
    assert "say nothing about speed" in re.sub(r"\s+", " ", done.output)


def _check_dlrm(found: dict[str, Any]) -> None:
    """The recommendation model learnt something, the same with and without fusion, and sent what
    was predicted.
    """
    assert found["passed"]
    assert found["loss"][1] < found["loss"][0]
    assert found["difference"] <= found["tolerance"]
    assert len(found["ranks"][0]["fused_losses"]) == found["sizes"]["fused_steps"]
    for rank in found["ranks"]:
        # Two tables of 8 columns a rank: vectors of the other rank's 16 samples, their gradients,
        # and one grant.
        assert rank["counted"] == rank["predicted"] == 2 * 16 * 2 * 8 * 4 + 4


def _document(
    error: float = 1e-3, digests: tuple[str, str] = ("a", "a"), puts: int = 2
) -> dict[str, Any]:
    demo = scripts.demo("down_projection")
    tile, wait = [("compute", -1)], ("wait", -1)
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank,
            "error": error,
            "digest": digests[rank],
            "predicted": {"puts": 2, "bytes": 64, "signals": 0},
            "counted": {"puts": puts, "bytes": 64, "signals": 0},
            "steps": {
                "fused": [*tile, put, *tile, put, wait],
                "unfused": [*tile, *tile, put, put, wait],
            },
            "times_us": {"fused": 10.0, "unfused": 15.0, "compute alone": 9.0},
        }
        for rank in range(2)
        for put in [("put", 1 - rank)]
    ]
    model = demo._judge(demo.MODELS[0], 32, (128, 112), 1, ranks)
    return {
        "backend": "cpu",
        "world_size": 2,
        "tokens": 1,
        "machine": {"gpus": ["GPU"]},
        "models": [model],
        "passed": model["passed"],
    }


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ({"error": 0.5}, "relative error 5.0e-01"),
        ({"error": float("nan")}, "relative error nan"),
        ({"digests": ("a", "b")}, "ranks differ"),
        ({"puts": 3}, "rank 0 sent"),
    ],
)
def test_demo_does_not_pass_what_is_wrong(
    fault: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    assert _document()["passed"]
    document = _document(**fault)
    assert not document["passed"]
    scripts.demo("down_projection")._show(Console(width=200), document, Outputs())
    assert what in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_pictures(backend: str, tmp_path: Path) -> None:
    scripts.demo("down_projection_picture").draw(
        {**_document(), "backend": backend}, tmp_path / "picture.png"
    )
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)


def test_picture_as_text() -> None:
    picture = scripts.demo("down_projection_picture")
    lines = picture.timeline_text(_document()["models"][0], width=10, blocks=False)
    assert lines[1:3] == [
        "  Fused, one kernel: 2 of 4 puts leave before the last tile is multiplied.",
        "  fused    rank 0  __@___@___  2 puts",
    ]
    assert lines[4:6] == [
        "  Unfused, the same work in two steps: 0 of 4 puts leave before the last tile is "
        "multiplied.",
        "  unfused  rank 0  ____@_@___  2 puts",
    ]
    assert picture.timeline_text({"name": "M", "ranks": [{}]}) == ["M: one rank, nothing to send."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["demo", "--backend", "tpu"],
            "Error: demo: --backend must be auto, cpu or cuda; got 'tpu'.",
        ),
        (
            ["demo", "--plot", "no/such/folder/x.png"],
            "Error: no/such/folder/x.png must be a PNG, SVG or PDF file that can be written",
        ),
        (
            ["bench", "gemv_all_reduce", "--tokens", "1,x"],
            "Error: --tokens must be positive numbers",
        ),
        (["doctor", "--backend", "tpu"], "must come with --network; it is not given"),
        (["bench", "gemv_all_reduce", "--shape", "12"], "Error: a shape must be NxK"),
        (["bench", "gemv_all_reduce", "--dtype", "int8"], "Error: --dtype must be one of bfloat16"),
        (
            ["tune", "gemv_all_reduce", "--table", "no/such/folder/t.json"],
            "Error: no/such/folder/t.json must be a file that can be written",
        ),
        (["bench", "table", "no-such-file.json"], "Error: no-such-file.json must be a JSON file"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "sweep"],
        ["bench", "table", "x.json"],
        ["tune", "profile", "x.json"],
        ["bench", "mixture_of_experts"],
        ["tune", "mixture_of_experts", "--table", "t.json"],
        ["bench", "embedding_all_to_all"],
        ["tune", "embedding_all_to_all", "--table", "t.json"],
        ["bench", "gemv_all_reduce", "--tokens", "4", "--tune"],
    ],
)
def test_what_needs_a_source_tree(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "_TREE", tmp_path)
    operator_commands.operator_commands.cache_clear()
    try:
        done = run(*arguments)
    finally:
        operator_commands.operator_commands.cache_clear()
    assert done.exit_code == 1
    assert "this command must run from a source tree of Interlace" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    "command",
    [
        ["bench", "gemv_all_reduce"],
        ["tune", "gemv_all_reduce", "--table", "t.json"],
        ["bench", "mixture_of_experts", "--part", "decoding"],
        ["bench", "embedding_all_to_all", "--backward"],
    ],
)
def test_measuring_needs_a_gpu(command: list[str]) -> None:
    done = run(*command)
    assert done.exit_code == 1
    assert f"Error: interlace {command[0]} must have CUDA GPUs" in done.output
    assert "interlace doctor" in done.output


@pytest.mark.parametrize(
    "command", [["bench", "gemv_all_reduce"], ["tune", "gemm_all_reduce", "--table", "t.json"]]
)
def test_measuring_needs_a_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    done = run(*command, "--world-size", "4")
    assert done.exit_code == 1
    assert f"interlace {command[0]} must have a GPU for each of 4 ranks" in done.output
    assert "got 2. Say --world-size 2." in done.output


def test_debug_shows_the_traceback() -> None:
    done = run("--debug", "bench", "gemv_all_reduce", "--shape", "12")
    assert isinstance(done.exception, interlace.ArgumentError)


def test_error_of_a_rank_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from interlace.cli.console import print_error

    print_error(
        interlace.LaunchError(
            "launch: rank 1 failed: ValueError: no [such] thing\n\nTraceback:\n  File x\n", 1
        )
    )
    first, hint = capsys.readouterr().err.splitlines()
    assert first == "Error: launch: rank 1 failed: ValueError: no [such] thing"
    assert "--debug" in hint


def test_doctor_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA checks, over a machine made up here: two GPUs, of which one cannot reach the
    other.
    """
    properties = SimpleNamespace(
        name="NVIDIA H200", total_memory=141 * 2**30, multi_processor_count=132, major=9, minor=0
    )
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda i: properties,
        "get_device_name": lambda i: properties.name,
        "can_device_access_peer": lambda i, j: (i, j) != (1, 0),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("interlace.cli.machine.driver_version", lambda: "580.1")
    monkeypatch.setattr("interlace.cli.machine.nccl_version", lambda: "2.30.3")
    monkeypatch.setattr(doctor, "_importable", lambda module: False)
    rows = {row.check: row for row in doctor.check_all()}
    assert rows["GPU 1"].meaning == "NVIDIA H200, 141 GiB, 132 SMs, sm_90"
    assert rows["peer access"].status == "missing"
    assert rows["peer access"].meaning.endswith("0: x x\n1: - x")
    assert rows["cuda-bindings"].action == "pip install cuda-bindings"
    assert rows["backend cpu"].status == "ok", "faults of the GPUs do not concern the cpu backend"
    assert rows["backend cuda"].status == "missing"
    assert "peer access, cuda-bindings" in rows["backend cuda"].meaning
    assert rows["machine profile"].status == "ok"
    assert rows["machine profile"].meaning.startswith("impl='auto' predicts times: ")
    assert rows["ranks per GPU"].meaning.startswith(
        "8 + 8 of 8 fit: ranks can share a GPU by time slices"
    )


@pytest.mark.parametrize(
    ("connections", "percentage", "status", "said"),
    [
        ("", "", "ok", "8 (CUDA's default"),
        ("32", "", "ok", "32 (CUDA_DEVICE_MAX_CONNECTIONS)"),
        ("1", "", "not here", "CUDA graphs with triggered transfers or slices are refused"),
        ("", "45", "missing", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE limits the SMs"),
    ],
)
def test_doctor_counts_the_queues(
    monkeypatch: pytest.MonkeyPatch, connections: str, percentage: str, status: str, said: str
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage)
    row = doctor._queues()
    assert row.status == status
    assert said in row.meaning


@pytest.mark.parametrize(("value", "status"), [("", "ok"), ("0", "ok"), ("1", "not here")])
def test_doctor_says_whether_nccl_may_send_results_on(
    monkeypatch: pytest.MonkeyPatch, value: str, status: str
) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", value)
    row = doctor._registration()
    assert row.status == status
    assert ("waits for ever" in row.meaning) == (status != "ok")


def test_an_operator_of_another_package_has_commands(tmp_path: Path) -> None:
    """Its declaration and its entry point are enough: nothing here names it, and nobody imports
    it. Packages that are broken are named, and nothing else is missing.
    """
    root = Path(__file__).resolve().parents[2]
    for package, lines in {
        "gemm_broadcast": "gemm_broadcast = gemm_broadcast\n",
        "removed": "gone = no_such_module\nhalf = half_of_one\n",
    }.items():
        metadata = tmp_path / f"{package}-0.1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n"
        )
        (metadata / "entry_points.txt").write_text(f"[interlace.operators]\n{lines}")
    (tmp_path / "half_of_one.py").write_text(
        "from interlace import registry\nregistry._operators['half'] = None\nraise ValueError(1)\n"
    )
    path = f"{tmp_path}:{root / 'examples' / 'your_own_operator'}:{root / 'src'}"
    code = """
import sys
import interlace.registry
from interlace.cli import main
assert "gemm_broadcast" in interlace.registry.operators()
assert "half" not in interlace.registry.operators()
for command in ("bench", "tune"):
    sys.argv = ["interlace", command, "gemm_broadcast", "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
sys.argv = ["interlace", "explain", "gemm_broadcast", "64x64x64"]
print("Usage: ")
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path, "COLUMNS": "200"},
        check=True,
        capture_output=True,
        text=True,
    )
    benching, tuning, explained = done.stdout.split("Usage: ")[1:]
    assert "No time of gemm_broadcast is predicted" in explained
    warned = [line for line in done.stderr.splitlines() if "RuntimeWarning: interlace: " in line]
    for reason in (
        "the package removed must be whole, to add operators; its entry point 'gone' "
        "(no_such_module) raised ModuleNotFoundError: No module named 'no_such_module'. ",
        "(half_of_one) raised ValueError: 1. ",
    ):
        assert sum(reason in line for line in warned) == 1, done.stderr
    assert len(warned) == 2
    assert "impl='auto' takes fused: nothing was measured" in explained
    for shown, option in ((benching, "--transports"), (tuning, "--table")):
        assert "GEMM + Broadcast: f" in shown
        assert option in shown


def test_transports_of_an_operator_without_them() -> None:
    done = run("bench", "gemm_all_reduce", "--transports")
    assert done.exit_code == 1
    assert "--transports must be of one of gemm_all_to_all and gemm_reduce_scatter" in done.output


_COMMANDS = """
def add_commands(operator, bench_app, tune_app):
    @bench_app.command(operator.name)
    def bench_operator(sizes: str) -> None:
        print("timed", operator.name, sizes)

    @bench_app.command("other")
    def other() -> None: ...
"""


def test_an_operator_names_the_module_of_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "commands_of_mine.py").write_text(_COMMANDS)
    monkeypatch.syspath_prepend(tmp_path)
    declared = {
        name: SimpleNamespace(name=name, command_module=module)
        for name, module in {
            "broken": "no_such_module",
            "mine": "commands_of_mine",
            "without": "",
        }.items()
    }
    monkeypatch.setattr("interlace.registry.operators", lambda: declared)
    operator_commands.operator_commands.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no_such_module must add the commands of broken"):
            commands = operator_commands.operator_commands()["bench"]
        assert sorted(commands) == ["mine", "other"]
        assert operator_commands.operator_commands()["tune"] == {}
        result = click.testing.CliRunner().invoke(commands["mine"], ["8x8"])
        assert result.output == "timed mine 8x8\n"
    finally:
        operator_commands.operator_commands.cache_clear()
