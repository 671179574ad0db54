"""The examples run; each ends by checking its own result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    ended = run_program(example, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
