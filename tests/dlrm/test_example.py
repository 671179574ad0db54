"""``examples/train_dlrm.py`` as a program: Criteo's text in, losses out.

An error is one line, and the exit code is not 0.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.programs import Ended, run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_dlrm.py"
SMALL = [
    "--world-size",
    "1",
    "--backend",
    "cpu",
    "--tables",
    "2",
    "--rows",
    "20",
    "--width",
    "4",
    "--batch",
    "8",
]


def _line(i: int) -> str:
    """Make a line whose click depends on the first category."""
    integers = [str(i % 7), *[""] * 12]
    return "\t".join([str(i % 2), *integers, f"{i % 2:08x}", f"{i % 5:08x}", *[""] * 24]) + "\n"


def _run(*arguments: object, folder: Path) -> Ended:
    return run_program(EXAMPLE, *SMALL, *arguments, folder=folder)


def test_train_stop_and_resume(tmp_path: Path) -> None:
    """A run that is resumed after 6 of 12 steps equals an uninterrupted one.

    Every tenth batch is held out, the last one padded.
    """
    data = tmp_path / "train.txt"
    data.write_text("".join(map(_line, range(158))))  # 19 batches and 6 lines
    options = [
        "--data",
        data,
        "--impl",
        "unfused",
        "--checkpoint",
        tmp_path / "runs",
        "--checkpoint-every",
        6,
        "--steps",
        12,
    ]
    outcomes = []
    for name, more in (("whole", []), ("resumed", ["--resume"])):
        file = tmp_path / f"{name}.json"
        done = _run(*options, *more, "--json", file, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        outcomes.append(json.loads(file.read_text()))
        shutil.rmtree(tmp_path / "runs" / "step-00000012")
    uninterrupted, resumed = outcomes
    assert resumed["steps"] == uninterrupted["steps"] == 12
    assert len(uninterrupted["losses"]) == 12
    assert resumed["losses"] == uninterrupted["losses"][6:]
    assert (resumed["loss"], resumed["auc"]) == (uninterrupted["loss"], uninterrupted["auc"])
    assert uninterrupted["samples"] == 8 + 6


def test_a_corrupt_line_under_strict(tmp_path: Path) -> None:
    data = tmp_path / "train.txt"
    data.write_text(_line(0) + "0\t1\n" + _line(1) * 20)
    done = _run("--data", data, "--strict", folder=tmp_path)
    assert done.returncode == 1
    assert (
        f"DataError: {data}, line 2 must have a label, 13 integers and 26 hexadecimal ids; got "
        "2 fields." in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("".join(_line(i).partition("\t")[2] for i in range(20)), "got no label: 39 fields"),
        ("", "must have 8 records or more, for one batch; got 0"),
        ("".join(map(_line, range(7))), "must have 8 records or more, for one batch; got 7"),
    ],
    ids=["no labels", "empty", "short"],
)
def test_nothing_to_train_on_is_an_error(tmp_path: Path, content: str, error: str) -> None:
    data = tmp_path / "train.txt"
    data.write_text(content)
    done = _run("--data", data, "--checkpoint", tmp_path / "runs", folder=tmp_path)
    assert done.returncode == 1
    assert error in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_of_nothing_is_null(tmp_path: Path) -> None:
    """JSON has no NaN; the file is packed, whatever its name says."""
    data, file = tmp_path / "train.txt", tmp_path / "result.json"
    data.write_bytes(gzip.compress("".join(map(_line, range(9))).encode()))
    done = _run("--data", data, "--impl", "unfused", "--json", file, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Held out: nothing" in done.stdout
    result = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (result["steps"], result["samples"], result["loss"], result["auc"]) == (1, 0, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": [Path("x")], "samples": 100}, "--data and --synthetic must not come together"),
        ({"samples": 100, "bottom": "64,x"}, "--bottom must be positive numbers"),
        ({"samples": 100, "top": "64,0"}, "--top must be positive numbers"),
        ({"samples": 100, "resume": True}, "--resume must come with --checkpoint"),
        ({"samples": 100, "strict": True}, "--strict must come with --data"),
        ({"checkpoint_every": 5}, "--checkpoint-every must come with --checkpoint"),
        ({"impl": "fused"}, "options must come with --data or --synthetic"),
        ({"samples": 100, "json_file": Path("nowhere/a")}, "--json must be in a folder"),
        ({}, ""),
        ({"samples": 100, "json_file": Path("a"), "bottom": "", "top": "8, 4"}, ""),
    ],
    ids=str,
)
def test_options_that_would_be_ignored_or_fail_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    example = runpy.run_path(str(EXAMPLE))
    settings = example["Settings"](**options)
    expected: Any = contextlib.nullcontext()
    if message:
        expected = pytest.raises(typer.BadParameter, match=f"^{message}")
    with expected:
        example["require_used"](settings)
