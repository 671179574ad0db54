"""``benchmarks/all_ranks.py``: a step that fails or hangs does not end the others, and leaves
nothing running.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import all_ranks
from benchmarks.all_ranks import Step, run_all, steps
from interlace.cli.app import app
from tests.test_code_blocks import parse

# A rank that ignores interrupts, and whose parent waits for it.
HANGS = """
import pathlib, subprocess, sys, time
rank = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"]
)
pathlib.Path(sys.argv[1]).write_text(str(rank.pid))
print("waits", flush=True)
time.sleep(600)
"""


def _python(name: str, program: str, *arguments: str, limit_s: float = 60) -> Step:
    return Step(name, limit_s, ("-c", program, *arguments))


def _outcomes(folder: Path) -> dict[str, str]:
    summary = json.loads((folder / "summary.json").read_text())
    return {name: step["outcome"] for name, step in summary.items()}


def _is_running(process: int) -> bool:
    try:
        # An orphan that nobody waits for stays as a zombie.
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def test_a_step_that_fails_or_hangs_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(all_ranks, "GRACE_S", 5.0)
    chosen = [
        _python("fails", "raise SystemExit('it was wrong')"),
        _python("hangs", HANGS, str(tmp_path / "pid"), limit_s=3),
        _python("passes", "import interlace; print('right')"),
        _python("too-long", "print('never')", limit_s=1000),
    ]
    assert run_all(chosen, tmp_path, budget_s=500) == 1
    assert _outcomes(tmp_path) == {
        "fails": "failed",
        "hangs": "timed out",
        "passes": "passed",
        "too-long": "no time left",
    }
    assert "it was wrong" in (tmp_path / "fails.log").read_text()
    assert "waits" in (tmp_path / "hangs.log").read_text()
    assert (tmp_path / "passes.log").read_text() == "right\n"
    assert not (tmp_path / "too-long.log").exists()
    rank, ends = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while _is_running(rank) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not _is_running(rank)
    assert capfd.readouterr().out.endswith("Not begun: --only too-long\n")


def test_runs_with_one_folder_add_up(tmp_path: Path) -> None:
    assert run_all([_python("first", "raise SystemExit(1)")], tmp_path, budget_s=90) == 1
    assert run_all([_python("second", "")], tmp_path, budget_s=90) == 0
    assert _outcomes(tmp_path) == {"first": "failed", "second": "passed"}
    assert run_all([_python("first", "")], tmp_path, budget_s=90) == 0
    assert _outcomes(tmp_path) == {"first": "passed", "second": "passed"}


def test_all_steps_fit_into_half_an_hour_and_their_commands_exist(tmp_path: Path) -> None:
    every = steps(8, tmp_path)
    assert len({step.name for step in every}) == len(every)
    assert sum(step.limit_s for step in every) <= 1800
    for step in every:
        if step.command[1] == "interlace":
            parse(typer.main.get_command(app), list(step.command[2:]))
            assert step.command[-1] == str(tmp_path / f"{step.name}.json")


def _run(*options: str) -> Any:
    return subprocess.run(
        [sys.executable, all_ranks.__file__, *options], capture_output=True, text=True, timeout=90
    )


def test_options(tmp_path: Path) -> None:
    dry = _run("--ranks", "4", "--out", "out", "--only", "soak", "doctor", "--dry-run")
    assert dry.stdout.splitlines() == [
        f"doctor, 60 s: python -m interlace doctor --json {os.getcwd()}/out/doctor.json",
        "soak, 100 s: python -m interlace soak -n 4 --seconds 60 --seed 8 --json "
        f"{os.getcwd()}/out/soak.json",
    ]
    assert "invalid choice: 'sok'" in _run("--out", str(tmp_path), "--only", "sok").stderr
