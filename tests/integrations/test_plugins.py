"""Plug-ins of programs that load them because Interlace is installed: they are on by choice."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from interlace.clients import CLIENTS
from interlace.integrations import hosts, sglang, vllm

PROGRAMS = {
    "vLLM": (vllm, "INTERLACE_VLLM", "VLLM_PLUGINS", "vllm.general_plugins"),
    "SGLang": (sglang, "INTERLACE_SGLANG", "SGLANG_PLUGINS", "sglang.srt.plugins"),
}


@pytest.mark.parametrize(
    ("value", "plugins", "is_on"),
    [
        ("", "", False),
        ("1", "", True),
        ("", "other, interlace", True),
        ("", "other", False),
        ("0", "interlace", False),
    ],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_plugins_are_on_by_choice(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    program: str,
    value: str,
    plugins: str,
    is_on: bool,
) -> None:
    module, variable, names, group = PROGRAMS[program]
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    entry: str = declared["project"]["entry-points"][group]["interlace"]
    assert entry == f"{module.__name__}:plugin"
    calls: list[Any] = []
    monkeypatch.setattr(module, "register", lambda: calls.append(program))
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv(names, plugins)
    monkeypatch.setenv("INTERLACE_MAX_WORKSPACE", "")
    monkeypatch.delenv("INTERLACE_MAX_WORKSPACE")
    with caplog.at_level(logging.INFO, "interlace.integrations"):
        import_module(module.__name__).plugin()
    assert calls == [program] * is_on
    (line,) = caplog.messages
    start = "Interlace is on in" if is_on else "Interlace is installed, but off in"
    assert line.startswith(f"{start} {program}")
    assert variable in line
    # An engine gives nearly all memory away before most calls are made.
    assert os.environ.get("INTERLACE_MAX_WORKSPACE") == ("2G" if is_on else None)


def test_only_the_first_process_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines load plug-ins in all of their processes."""
    monkeypatch.setenv("INTERLACE_VLLM", "1")
    monkeypatch.setattr(hosts.multiprocessing, "parent_process", lambda: object())
    with caplog.at_level(logging.INFO, "interlace.integrations"):
        assert hosts.is_chosen(CLIENTS["vllm"])
    assert not caplog.messages


def test_the_limit_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one is none."""
    for limit in ("", "3G"):
        monkeypatch.setenv("INTERLACE_MAX_WORKSPACE", limit)
        hosts.limit_memory(CLIENTS["vllm"])
        assert os.environ["INTERLACE_MAX_WORKSPACE"] == limit


def test_the_log_of_a_program_shows_lines_of_interlace() -> None:
    """vLLM configures its own logger alone. This runs in a process of its own."""
    program = """
import logging, sys
theirs = logging.getLogger("vllm")
theirs.addHandler(logging.StreamHandler(sys.stdout))
theirs.setLevel(logging.INFO)
theirs.propagate = False
from interlace.integrations import hosts
for _ in range(2):
    hosts.log_through("vllm")
logging.getLogger("interlace.compile").info("said once")
logging.getLogger("interlace.compile").debug("not said")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "said once\n"
    assert "said" not in done.stderr
