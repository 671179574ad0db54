"""``interlace trace``: the file, the words, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from interlace.cli.app import app
from interlace.cli.trace_simulated import comparison
from interlace.tracing import PHASES, Account


def run(*arguments: object, command: str = "trace") -> Result:
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def test_a_trace_of_two_ranks(tmp_path: Path, quick_launches: None) -> None:
    file = tmp_path / "trace.json"
    done = run(
        "gemm_reduce_scatter", "64x48x16", "--backend", "cpu", "-n", 2, "--dtype", "float32",
        "--trace", file, "--simulated", "--plot", tmp_path / "trace.svg",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "gemm_reduce_scatter fused: 64 x 48 x 16" in done.output
    assert "simulated on NVIDIA H200: " in done.output
    drawn = (tmp_path / "trace.svg").read_text()
    assert "order of events" in drawn
    # What has an order only has no time axis that a simulation could share.
    assert "simulated" not in drawn
    assert "2 ranks, 1 launches each of gemm_reduce_scatter" in done.output
    assert "only the order of events counts" in done.output
    document = json.loads(file.read_text())
    names = [event["name"] for event in document["traceEvents"]]
    processes = {event["args"]["name"] for event in document["traceEvents"]
                 if event["name"] == "process_name"}  # fmt: skip
    assert processes == {f"{kind}{name}" for kind in ("", "simulated ")
                         for name in ("rank 0", "rank 1", "links")}  # fmt: skip
    assert "compute 0" in names
    assert "0 to 1: bytes in flight" in names
    assert document["otherData"]["clock"] == "order of events only"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemm"], "OPERATOR must be one of"),
        (["gemm_broadcast"], "of your own, put interlace.trace() around calls of it"),
        (["gemm_reduce_scatter", "--impl", "fast"], "--impl must be one of fused"),
        (
            ["gemm_reduce_scatter", "8x8x8x8"],
            "SHAPE must be whole numbers from 1 to 2^30 for rows x columns",
        ),
        (["gemm_reduce_scatter", "8xk"], "SHAPE must be whole numbers"),
        (["gemm_reduce_scatter", "0x8192x2048", "--gpu", "h200"], "whole numbers from 1 to 2^30"),
        (["gemv_all_reduce", "0x0x64"], "whole numbers from 1 to 2^30 for rows x columns x"),
        (["mixture_of_experts", "7x-2"], "must be whole numbers from 1 to 2^30"),
        (["gemm_reduce_scatter", "²x8x8"], "must be whole numbers from 1 to 2^30"),
        (["gemm_reduce_scatter", "9" * 5000], "must be whole numbers from 1 to 2^30"),
        (
            ["gemm_reduce_scatter", 1 << 30, "--gpu", "h200"],
            "at most 262144 tiles on all",
        ),
        # The shape of the command's own help.
        (["gemm_reduce_scatter", "8192x8192x2048"], "Make it smaller, or say --gpu h200"),
        (["gemm_reduce_scatter", "--calls", 1000], "on the CPU backend, whose kernels run in an"),
        (["embedding_all_to_all", 1 << 20], "at most 1.3e+08 multiplications on the CPU backend"),
        (["gemm_reduce_scatter", "--dtype", "int8"], "--dtype must be one of bfloat16, float16,"),
        (
            ["gemm_reduce_scatter", "--gpu", "z9"],
            "--gpu must name one of AMD Instinct MI300X, NVIDIA A10",
        ),
        (["mixture_of_experts", "--gpu", "h200"], "--gpu must be given for an operator around one"),
        (["gemm_reduce_scatter", "--backend", "cuda"], "must have CUDA GPUs; got none"),
    ],
)
def test_what_it_refuses(
    arguments: list[object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    done = run(*arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())


def test_a_call_that_is_only_simulated(tmp_path: Path) -> None:
    """Nobody needs a GPU to see what a call would look like, and to draw it once more."""
    file, first, second = (tmp_path / name for name in ("trace.json", "first.svg", "second.svg"))
    done = run(
        "gemm_reduce_scatter", "1024x2048x512", "--gpu", "h200", "--impl", "chunked",
        "--trace", file, "--plot", first,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "gemm_reduce_scatter chunked: 1024 x 2048 x 512" in said
    assert "4 x NVIDIA H200, simulated" in said
    assert "above the product alone" in said
    assert "Simulated, not measured: products" in said
    done = run(file, "--plot", second, "--rows", 3, "--width", 7, command="picture")
    assert done.exit_code == 0, done.output
    for picture, programs in ((first, 12), (second, 3)):
        drawn = picture.read_text()
        assert "above the product's" in drawn
        assert "simulated rank 0" in drawn
        assert "a library's product" in drawn
        assert f", {programs} of " in drawn


def test_simulated_ranks_begin_together(tmp_path: Path) -> None:
    shape = ("gemm_reduce_scatter", "2048x2048x512")
    done = run(*shape, "--gpu", "h200", "--trace", tmp_path / "trace.json")
    assert done.exit_code == 0, done.output
    assert "slowest: rank 3 it began together with the others" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a document with traceEvents"),
        ('{"traceEvents": []}', "must have something to show"),
        ("trace", "must be a trace that `interlace trace` has written"),
        ('{"traceEvents": [{"ph": "M"}]}', "trace` has written; KeyError: 'pid'"),
        ('{"traceEvents": [1]}', "trace` has written; TypeError: 'int' object is not"),
        ('{"traceEvents": [NaN]}', "trace` has written; NaN is not a number of JSON"),
        ('{"traceEvents": [1e999]}', "trace` has written; 1e999 is not a number of JSON"),
        ("[" * 100_000, "trace` has written; maximum recursion depth exceeded"),
    ],
)
def test_what_is_no_trace_is_not_drawn(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    done = run(file, "--plot", tmp_path / "trace.png", command="picture")
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "trace.png").exists()


def test_where_two_timelines_part() -> None:
    """A phase parts by 10 % of it and 1 % of the call; a small one, or a small difference, not."""

    def account(**phases: float) -> Account:
        every = dict.fromkeys(PHASES, 0.0) | phases
        return Account(0, sum(every.values()), every, (), 0, 4, 0)

    measured = account(compute=400_000, wait=40_000, put=2_000, sum=50_000)
    table = comparison(measured, account(compute=430_000, wait=30_000, put=4_000, sum=60_000))
    rows = {
        row[0]: row[1:] for row in zip(*(column.cells for column in table.columns), strict=True)
    }
    assert rows == {
        "compute": ("400 us", "430 us", "+30 us (+8%)", ""),
        "put": ("2 us", "4 us", "+2 us (+100%)", ""),
        "wait": ("40 us", "30 us", "-10 us (-25%)", "parts"),
        "sum": ("50 us", "60 us", "+10 us (+20%)", "parts"),
        "total": ("492 us", "524 us", "+32 us (+7%)", ""),
    }
