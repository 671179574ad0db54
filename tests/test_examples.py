"""The examples run; each ends by checking its own result."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.programs import run_program

# Modules that an example needs and Interlace does not.
NEEDED = {"huggingface_decode": ("transformers", "accelerate")}
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    absent = [name for name in NEEDED.get(example.stem, ()) if not importlib.util.find_spec(name)]
    if absent:
        pytest.skip(f"make test-integrations installs {', '.join(absent)}")
    ended = run_program(example, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
