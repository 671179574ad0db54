"""When calls become graphs; what graphs do is tested on GPUs (tests/gpu/test_replays_gpu.py)."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from interlace.comm.groups.group import Group
from interlace.comm.host import cache
from interlace.comm.replay import deferred
from interlace.comm.replay import replays as module
from interlace.comm.replay.deferred import DeferredCall
from interlace.comm.replay.replays import Replays
from interlace.errors import BackendError


class _Graph:
    def __init__(self, enqueue: Any, done: list[str]) -> None:
        self.name, self.done = enqueue.__name__, done

    def replay(self) -> None:
        self.done.append(f"replay {self.name}")


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch, done: list[str]) -> Replays:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("synchronize"))
    made = Replays(torch.device("cuda:0"))
    monkeypatch.setattr(made, "_capture", lambda enqueue: _Graph(enqueue, done))
    return made


def _call(replays: Replays, key: int, done: list[str]) -> None:
    def enqueue() -> None:
        done.append(f"enqueue {key}")

    enqueue.__name__ = str(key)
    replays.run(key, enqueue)


def test_the_second_call_makes_a_graph_that_later_ones_replay(
    replays: Replays, done: list[str]
) -> None:
    for key in (1, 1, 2, 1):
        _call(replays, key, done)
    assert done == ["enqueue 1", "replay 1", "enqueue 2", "replay 1"]
    assert len(replays) == 1


def test_a_copy_is_not_replayed_to_another_allocation_at_the_same_address(
    replays: Replays, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies would go to the memory that lay there when it was captured."""
    received, nothing = torch.empty(1), torch.empty(0)
    allocations = iter([1, 1, 1, 2, 2])
    monkeypatch.setattr(module, "allocation_of", lambda _: next(allocations))

    def copy() -> None:
        done.append("enqueue copy")

    for _ in range(5):
        replays.run("key", copy, copied=[received, nothing])
    assert done == [
        *("enqueue copy", "replay copy", "replay copy"),
        *("enqueue copy", "replay copy"),
    ]
    assert len(replays) == 2


def test_copies_of_memory_that_the_driver_does_not_know_are_enqueued(
    replays: Replays, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_: int) -> int:
        raise BackendError("a CUDA driver call failed")

    monkeypatch.setattr(module, "allocation_of", unknown)

    def copy() -> None:
        done.append("enqueue copy")

    for _ in range(3):
        assert replays.run("key", copy, copied=[torch.empty(1)])
    assert done == ["enqueue copy"] * 3
    assert len(replays) == 0


def test_cleared_graphs_have_run_and_come_again(replays: Replays, done: list[str]) -> None:
    for _ in range(2):
        _call(replays, 1, done)
    replays.clear()
    replays.clear()
    assert len(replays) == 0
    for _ in range(2):
        _call(replays, 1, done)
    assert done == ["enqueue 1", "replay 1", "synchronize", "enqueue 1", "replay 1"]


def test_a_program_with_too_many_addresses_enqueues(
    replays: Replays, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept stays while it is used; the one that was not used for longest makes room."""
    monkeypatch.setattr(module, "_MAX_GRAPHS", 2)
    monkeypatch.setattr(module, "_IDLE_RUNS", 8)
    for _ in range(2):
        for key in (1, 2, 3):
            _call(replays, key, done)
    assert done[3:] == ["replay 1", "replay 2", "enqueue 3"]
    done.clear()
    for _ in range(6):
        _call(replays, 2, done)
    _call(replays, 3, done)
    assert done == ["replay 2"] * 6 + ["synchronize", "replay 3"]
    _call(replays, 1, done)
    assert done[-1] == "enqueue 1"


def test_calls_that_are_forgotten_count_as_new(
    replays: Replays, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_CANDIDATES", 2)
    for key in (1, 2, 3, 1, 1):
        _call(replays, key, done)
    assert done == ["enqueue 1", "enqueue 2", "enqueue 3", "enqueue 1", "replay 1"]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no memory"), torch.AcceleratorError("CUDA error: out of memory")],
)
def test_a_call_runs_without_a_graph_where_there_is_no_memory_for_one(
    replays: Replays, done: list[str], monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """The peers may have memory, and wait for the call."""
    capture = mock.Mock(side_effect=error)
    monkeypatch.setattr(replays, "_capture", capture)
    for _ in range(3):
        _call(replays, 1, done)
    assert done == ["enqueue 1"] * 3
    assert len(replays) == 0
    capture.side_effect = ValueError("another error")
    with pytest.raises(ValueError, match="another error"):
        _call(replays, 1, done)


def test_a_programs_own_graph_holds_the_call_itself(
    replays: Replays, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        _call(replays, 1, done)
    assert done == ["enqueue 1"] * 3


@pytest.mark.parametrize(("backend", "setting"), [("cpu", "1"), ("cuda", "0")])
def test_without_graphs(
    done: list[str], monkeypatch: pytest.MonkeyPatch, backend: str, setting: str
) -> None:
    monkeypatch.setenv("INTERLACE_REPLAY", setting)
    made = Replays(torch.device(backend))
    for _ in range(3):
        _call(made, 1, done)
    assert done == ["enqueue 1"] * 3


def _set_matmul(name: str) -> Any:
    return lambda value: setattr(torch.backends.cuda.matmul, name, value)


# How to set each, another value than the default, and the default.
_SETTINGS = {
    "allow_tf32": (_set_matmul("allow_tf32"), True, False),
    "allow_fp16_reduced_precision_reduction": (
        _set_matmul("allow_fp16_reduced_precision_reduction"),
        False,
        True,
    ),
    "allow_bf16_reduced_precision_reduction": (
        _set_matmul("allow_bf16_reduced_precision_reduction"),
        False,
        True,
    ),
    "allow_fp16_accumulation": (_set_matmul("allow_fp16_accumulation"), True, False),
    "float32_matmul_precision": (torch.set_float32_matmul_precision, "high", "highest"),
    "deterministic_algorithms": (torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.parametrize("name", _SETTINGS)
def test_a_graph_with_other_settings_is_another_graph(
    replays: Replays, done: list[str], name: str
) -> None:
    """A graph keeps the settings of its capture. The call under new ones comes for the first
    time.
    """
    change, other, default = _SETTINGS[name]
    for _ in range(2):
        _call(replays, 1, done)
    change(other)
    try:
        _call(replays, 1, done)
        replays.run(1, lambda: done.append("enqueue without libraries"), with_libraries=False)
    finally:
        change(default)
    _call(replays, 1, done)
    assert done == ["enqueue 1", "replay 1", "enqueue 1", "enqueue without libraries", "replay 1"]


def test_a_remembered_call_keeps_no_operand(replays: Replays) -> None:
    """What prepares it and what makes others like it refer to operands, whose memory is torch's."""
    operand = torch.ones(1)
    alive = weakref.ref(operand)
    work = DeferredCall(
        ("call",),
        take=lambda _: (),
        prepare=lambda *_, x=operand: x.sum,
        again=lambda x=operand: None,
        with_libraries=False,
    )
    for _ in range(3):
        replays.perform(work, (), work.prepare(), "operands")
    assert isinstance(replays.remembered("operands"), DeferredCall)
    del work, operand
    assert alive() is None


def test_tables_of_numbers_stay_for_calls_that_may_be_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of an epoch have more splits than are remembered; each is captured when it comes
    again, with its table.
    """
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(cache, "_MAX_RECENT", 4)
    group = Group(None, torch.device("cpu"))
    group.replays.is_enabled = True
    used: list[torch.Tensor] = []

    def capture(enqueue: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(group.streams, "capture_id", lambda: 1)
            patch.setattr(group.replays, "capturing", True)
            enqueue()
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(group.replays, "_capture", capture)
    for _ in range(2):
        for first in range(12):
            splits = (first, 100 - first)
            group.replays.run(
                splits, lambda splits=splits: used.append(group.cache.tables.on_device([splits]))
            )
    assert [each.tolist() for each in used] == [[[first, 100 - first]] for first in range(12)] * 2
    assert len(group.replays) == 12
    assert not group.cache.tables.captured, (
        "graphs of the group keep their tables, and no longer than they live"
    )
    group.replays.clear()
    used.clear()
    assert len(group.cache.tables.alive) == 4


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (0, 5), (5, 0), (7,), ()])
def test_new_tensors_on_the_current_gpu_have_pytorchs_strides(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    on_cpu = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(deferred, "_empty_on_current_gpu", on_cpu)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    made = deferred.empty(shape, torch.bfloat16, torch.device("cuda:1"))
    wanted = torch.empty(shape, dtype=torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == (shape, wanted.stride(), torch.bfloat16)


def test_new_tensors_elsewhere_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_empty_on_current_gpu", lambda *_: pytest.fail("not there"))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    asked: list[Any] = []
    with mock.patch.object(torch, "empty", lambda shape, **keywords: asked.append(keywords)):
        deferred.empty((2,), torch.int32, torch.device("cuda:0"))
        deferred.empty((2,), torch.int32, torch.device("cpu"))
    assert [str(each["device"]) for each in asked] == ["cuda:0", "cpu"]
