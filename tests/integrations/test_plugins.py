"""Plug-ins of programs that load them because Interlace is installed: they are on by choice."""

from __future__ import annotations

import logging
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from interlace.integrations import sglang, vllm

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
    with caplog.at_level(logging.INFO, "interlace.integrations"):
        import_module(module.__name__).plugin()
    assert calls == [program] * is_on
    (line,) = caplog.messages
    start = "Interlace is on in" if is_on else "Interlace is installed, but off in"
    assert line.startswith(f"{start} {program}")
    assert variable in line
