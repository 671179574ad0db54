"""Contexts and rings of launches that record events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.comm import context, recording
from interlace.comm.recording import Recording

OWN = torch.arange(context.LENGTH)


def _recording() -> Recording:
    health: Any = SimpleNamespace(has_made=lambda tensor: tensor is OWN)
    return Recording(health, torch.device("cpu"))


def kernel() -> None:
    """Stands for a kernel."""


def test_a_launch_gets_a_context_of_its_own() -> None:
    made = _recording()
    first, second = (made.arguments(kernel, 3, {"ctx": OWN, "x": 1}) for _ in range(2))
    assert first["x"] == 1
    assert OWN.dtype == torch.int64
    for arguments, launch in zip((first, second), made.launches, strict=True):
        ctx = arguments["ctx"]
        assert ctx.dtype == torch.uint64
        fields = ctx.view(torch.int64).tolist()
        assert fields[: context.LENGTH] == OWN.tolist()
        assert fields[context.RINGS_ADDRESS] == launch.rings.data_ptr()
        assert fields[context.RING_PROGRAMS] == len(launch.rings) == 3
        assert launch.name == "kernel"
        assert not launch.rings.any()


def test_what_takes_no_context_of_the_group_is_left_alone() -> None:
    made = _recording()
    other = OWN.clone()
    for arguments in ({"x": 1}, {"ctx": other}):
        assert made.arguments(kernel, 3, arguments) == arguments
    assert made.launches == []


def test_a_context_for_a_kernel_of_any_size_is_replaced() -> None:
    """An operator asks for its context before it is known that a ``Launch`` will take it."""
    made = _recording()
    general = made.context(OWN, "operator")
    for _ in range(2):
        made.arguments(kernel, 4, {"ctx": general})
    assert [(launch.name, len(launch.rings)) for launch in made.launches] == [("kernel", 4)] * 2
    first, second = (launch.rings for launch in made.launches)
    assert first.data_ptr() == general.view(torch.int64)[context.RINGS_ADDRESS]
    assert second.data_ptr() == first.data_ptr() + first.nbytes


def test_launches_without_memory_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_BYTES", recording._ARENA_BYTES)
    made = _recording()
    programs = recording._ARENA_BYTES // recording._PROGRAM_BYTES
    assert made.context(OWN, "all of it", programs) is not OWN
    assert made.context(OWN, "one more", 1) is OWN
    assert made.unrecorded == 1
