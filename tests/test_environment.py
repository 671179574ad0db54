"""Switches and numbers in environment variables."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from typer.testing import CliRunner

from interlace import environment
from interlace.cli.app import app
from interlace.errors import ArgumentError

VARIABLE = "NAME_OF_A_VARIABLE"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("on", True), ("True", True), ("0", False), ("no", False), ("", None)],
)
def test_switches(monkeypatch: pytest.MonkeyPatch, text: str, expected: bool | None) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert environment.switch(VARIABLE) is expected


def test_a_text_is_the_one_that_is_set_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the interpreter keeps variables as CPython does, and where it does not."""
    assert environment.text_of(VARIABLE) is None
    monkeypatch.setenv(VARIABLE, "1")
    assert environment.text_of(VARIABLE) == "1"
    with mock.patch.object(os, "environ", {VARIABLE: "2"}):
        assert environment.text_of(VARIABLE) == "2"
    with mock.patch.object(os, "environ", {}):
        assert environment.text_of(VARIABLE) is None


def test_a_switch_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.switch(VARIABLE) is None
    monkeypatch.setenv(VARIABLE, "2")
    with pytest.raises(ArgumentError, match=f"{VARIABLE} must be 1 or 0; got '2'"):
        environment.switch(VARIABLE)


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.whole_number(VARIABLE, 4) == 4
    with pytest.raises(ArgumentError, match="must be a whole number; got ''"):
        environment.whole_number(VARIABLE)
    monkeypatch.setenv(VARIABLE, "12")
    assert environment.whole_number(VARIABLE, 4, least=12) == 12
    with pytest.raises(ArgumentError, match="must be a whole number of at least 13; got '12'"):
        environment.whole_number(VARIABLE, 4, least=13)
    for text in ("1.5", "-1", "few", "²", "9" * 5000):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(ArgumentError, match=f"must be a whole number; got '{text}'"):
            environment.whole_number(VARIABLE, 4)


def test_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.byte_count(VARIABLE) is None
    for text, count in (("0", 0), ("4096", 4096), ("512M", 512 << 20), ("3GiB", 3 << 30)):
        monkeypatch.setenv(VARIABLE, text)
        assert environment.byte_count(VARIABLE) == count
    for text in ("1.5G", "512MB", "M", "-1", "few", "9" * 5000):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(ArgumentError, match=f"must be a number of bytes, .*; got '{text}'"):
            environment.byte_count(VARIABLE)


def test_commands_say_which_variable_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLACE_DEBUG", "perhaps")
    done = CliRunner().invoke(app, ["explain", "gemm_all_to_all", "8x8x8"])
    assert done.exit_code == 1
    assert "INTERLACE_DEBUG must be 1 or 0; got 'perhaps'" in done.output
