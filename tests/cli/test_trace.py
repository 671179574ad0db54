"""``interlace trace``: the file, the words, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from interlace.cli.app import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_a_trace_of_two_ranks(tmp_path: Path, quick_launches: None) -> None:
    file = tmp_path / "trace.json"
    done = run(
        "gemm_reduce_scatter", "64x48x16", "--backend", "cpu", "-n", 2, "--dtype", "float32",
        "--trace", file,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "gemm_reduce_scatter fused: 64 x 48 x 16" in done.output
    assert "2 ranks, 1 launches each of gemm_reduce_scatter" in done.output
    assert "only the order of events counts" in done.output
    document = json.loads(file.read_text())
    names = [event["name"] for event in document["traceEvents"]]
    assert "compute 0" in names
    assert "0 to 1: bytes in flight" in names
    assert document["otherData"]["clock"] == "order of events only"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemm"], "OPERATOR must be one of"),
        (["gemm_reduce_scatter", "--impl", "fast"], "--impl must be one of fused"),
        (["gemm_reduce_scatter", "8x8x8x8"], "SHAPE must be whole numbers for rows x columns x"),
        (["gemm_reduce_scatter", "8xk"], "SHAPE must be whole numbers"),
        (["gemm_reduce_scatter", "--backend", "cuda"], "must have CUDA GPUs; got none"),
    ],
)
def test_what_it_refuses(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    done = run(*arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
