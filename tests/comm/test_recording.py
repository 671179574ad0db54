"""Contexts and rings of launches that record events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from interlace.comm.replay import recording
from interlace.comm.replay.recording import Recording
from interlace.comm.runtime import context

OWN = torch.arange(context.LENGTH)


def _recording() -> Recording:
    health: Any = SimpleNamespace(has_made=lambda tensor: tensor is OWN)
    return Recording(health)


def kernel() -> None:
    """Stands for a kernel."""


def _two_launches() -> None:
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
    rings = [launch.rings.data_ptr() for launch in made.launches]
    assert abs(rings[0] - rings[1]) >= made.launches[0].rings.nbytes


def test_a_launch_gets_a_context_of_its_own(ranks: Any) -> None:
    ranks(1).run(_two_launches)


def test_what_takes_no_context_of_the_group_is_left_alone() -> None:
    made = _recording()
    other = OWN.clone()
    for arguments in ({"x": 1}, {"ctx": other}):
        assert made.arguments(kernel, 3, arguments) == arguments
    assert made.launches == []


def _general_context() -> None:
    made = _recording()
    general = made.context(OWN, "operator")
    for _ in range(2):
        made.arguments(kernel, 4, {"ctx": general})
    assert [(launch.name, len(launch.rings)) for launch in made.launches] == [("kernel", 4)] * 2


def test_a_context_for_a_kernel_of_any_size_is_replaced(ranks: Any) -> None:
    """An operator asks for its context before it is known that a ``Launch`` will take it."""
    ranks(1).run(_general_context)


def _rings_of_many_programs() -> None:
    def filled(*shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, 7, **options)

    made = _recording()
    with mock.patch.object(torch, "empty", filled):
        made.context(OWN, "operator", 300)
    (launch,) = made.launches
    assert launch.rings.shape[:2] == (300, context.RING_LANES)
    assert not launch.rings[:, :, 0, 0].any()
    assert (launch.rings[:, :, 0, 1] == 7).all()
    assert (launch.rings[:, :, 1:] == 7).all()


def test_all_rings_are_emptied_and_nothing_else_is_written(ranks: Any) -> None:
    """There are more of them than one program of the preparing kernel empties."""
    ranks(1).run(_rings_of_many_programs)


def _without_memory() -> None:
    programs = 5
    nbytes = programs * context.RING_LANES * context.RING_BYTES
    with mock.patch.object(recording, "MAX_BYTES", nbytes):
        made = _recording()
        assert made.context(OWN, "all of it", programs) is not OWN
        assert made.context(OWN, "one more", 1) is OWN
    assert made.unrecorded == 1


def test_launches_without_memory_record_nothing(ranks: Any) -> None:
    ranks(1).run(_without_memory)
