"""The examples run; each ends by checking its own result."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.programs import run_program

# Modules that an example needs and Interlace does not.
NEEDED = {"huggingface_decode": ("transformers", "accelerate")}
FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    absent = [name for name in NEEDED.get(example.stem, ()) if not importlib.util.find_spec(name)]
    if absent:
        pytest.skip(f"make test-integrations installs {', '.join(absent)}")
    ended = run_program(example, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("demo", "option"),
    [
        ("down_projection", "--plot FILE"),
        ("mapped_output", "--json FILE"),
        ("train_small_dlrm", "--world-size"),
        ("between_nodes", "--nodes"),
    ],
)
def test_a_demo_says_what_it_does(demo: str, option: str, tmp_path: Path) -> None:
    """The tests of ``interlace demo`` run all of them."""
    ended = run_program(FOLDER / "demos" / f"{demo}.py", "--help", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"python examples/demos/{demo}.py" in ended.stdout
    assert option in ended.stdout


def test_a_demo_runs_by_itself(tmp_path: Path) -> None:
    script, file = FOLDER / "demos" / "mapped_output.py", tmp_path / "found.json"
    ended = run_program(script, "-n", 2, "--backend", "cpu", "--json", file, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["passed"]
    assert document["command"].startswith("python ")
    refused = run_program(script, "--backend", "tpu", folder=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr == "Error: demo: --backend must be auto, cpu or cuda; got 'tpu'.\n"
