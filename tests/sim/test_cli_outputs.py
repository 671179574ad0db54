"""A command's files: refused before the work begins, made only if asked for, and named."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError


def test_only_files_that_were_asked_for_are_made(tmp_path: Path) -> None:
    outputs = Outputs(json=tmp_path / "a.json", plot=tmp_path / "a.png")
    outputs.write_csv(lambda: pytest.fail("nobody asked for a table"))
    outputs.write_trace(lambda: pytest.fail("nobody asked for a trace"))
    outputs.write_json(lambda: {"total_ns": 1})
    outputs.write_json(lambda: {"total_ns": 2})
    outputs.write_plot(lambda file: file.write_bytes(b"picture"))
    outputs.write_plot(lambda file: file.write_bytes(b"bars"), "-bars")
    assert json.loads((tmp_path / "a.json").read_text()) == {"total_ns": 2}
    assert (tmp_path / "a-bars.png").read_bytes() == b"bars"
    text = io.StringIO()
    outputs.say_written(Console(file=text, width=1000))
    names = ("a.json", "a.png", "a-bars.png")
    assert text.getvalue() == f"Written: {', '.join(str(tmp_path / name) for name in names)}\n"


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    """JSON has no NaN and no infinity, however deep they are."""
    outputs = Outputs(json=tmp_path / "a.json", trace=tmp_path / "a.trace")
    outputs.write_json(lambda: {"a": [1.5, (math.nan, {"b": -math.inf})], "c": np.float64("inf")})
    outputs.write_trace(lambda: {"traceEvents": [{"ts": math.nan}]})
    for name, document in {
        "a.json": {"a": [1.5, [None, {"b": None}]], "c": None},
        "a.trace": {"traceEvents": [{"ts": None}]},
    }.items():
        text = (tmp_path / name).read_text()
        assert json.loads(text, parse_constant=pytest.fail) == document


def test_nothing_written_says_nothing() -> None:
    text = io.StringIO()
    outputs = Outputs()
    outputs.write_json(lambda: pytest.fail("nobody asked for JSON"))
    outputs.say_written(Console(file=text))
    assert text.getvalue() == ""


@pytest.mark.parametrize("option", ["json", "csv", "trace"])
def test_paths_that_cannot_be_written_are_refused_early(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "nowhere" / "a", "No such file or directory"),
        (tmp_path / "file" / "a", "Not a directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / ("a" * 300), "File name too long"),
    ):
        with pytest.raises(ArgumentError, match=f"must be a file that can be written; {reason}"):
            Outputs(**{option: path})
    with pytest.raises(ArgumentError, match="must be a PNG, SVG or PDF file that can be written"):
        Outputs(plot=tmp_path / "nowhere" / "a.png")
    for name in ("a", "a.txt", "png"):
        with pytest.raises(ArgumentError, match=r"must end in \.png, \.svg or \.pdf"):
            Outputs(plot=tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_folder_of_files_under_their_own_names(tmp_path: Path) -> None:
    outputs = Outputs(folder=tmp_path / "new" / "out")
    outputs.write("a.txt", "text")
    outputs.write("a.json", [1])
    outputs.write("a.png", lambda file: file.write_bytes(b"picture"))
    folder = tmp_path / "new" / "out"
    assert outputs.written == [folder / name for name in ("a.txt", "a.json", "a.png")]
    assert (folder / "a.txt").read_text() == "text"
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="--out must be a folder that can be made"):
        Outputs(folder=tmp_path / "file" / "out")


def test_later_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of torchrun run the command, and one of them may write."""
    monkeypatch.setenv("RANK", "1")
    outputs = Outputs(json=tmp_path / "a.json", folder=tmp_path / "out")
    outputs.write_json(lambda: pytest.fail("not on this rank"))
    outputs.write("a.txt", "text")
    assert not list(tmp_path.iterdir())
    assert not outputs.written
