"""The benchmark of decoding runs, tiny, on the CPU: results are checked, nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface_decode.py"

pytest.importorskip("transformers", minversion="5.23", reason="make test-integrations installs it")
pytest.importorskip("accelerate", reason="transformers needs it to shard a model")


def test_without_inductor(tmp_path: Path) -> None:
    """Every layer's two all-reduces are fused with residual and norm; the same tokens come out."""
    ended = run_program(EXAMPLE, "--layers", 1, "--new-tokens", 3, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("fused by gemm_all_reduce_norm") == 2
    assert "100%" in ended.stdout


@pytest.mark.inductor
def test_with_inductor(tmp_path: Path) -> None:
    """As a benchmark on GPUs runs it, up to the times."""
    options = ("--layers", 1, "--new-tokens", 3, "--dtype", "bfloat16")
    ended = run_program(EXAMPLE, *options, "--times", "--merge-products", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("fused by gemm_all_reduce_norm") == 2
    assert ended.stdout.count("fused by linears") == 2


def test_a_size_that_does_not_exist(tmp_path: Path) -> None:
    ended = run_program(EXAMPLE, "--size", "9b", folder=tmp_path)
    assert ended.returncode == 2
    assert "must be one of tiny, 1b, 8b, 70b; got 9b" in " ".join(ended.stderr.split())
