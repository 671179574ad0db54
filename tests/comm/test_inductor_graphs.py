"""Runs of which Inductor makes CUDA graphs, without a GPU: what is recognised as one, where lasting
memory is made then, and which memory a call gets that peers may have captured.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace.operators  # registers torch.ops.interlace
from interlace.comm import Group, group_of
from interlace.comm.groups.outputs import LANDING
from interlace.comm.replay.replays import Replays
from interlace.comm.runtime import ordinary
from interlace.comm.runtime.ordinary import makes_ordinary_tensors

_TREES = "torch._inductor.cudagraph_trees"


class _Stream:
    """A CUDA stream that remembers what it waited for."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.waited: list[_Stream] = []
        self.synchronized = 0

    def wait_stream(self, other: _Stream) -> None:
        self.waited.append(other)

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU whose current stream is a thread's own, and Inductor's manager of graphs for it."""
    streams = threading.local()
    default = _Stream(0)

    def current() -> _Stream:
        stream: _Stream = getattr(streams, "current", default)
        return stream

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda _: current().cuda_stream, raising=False
    )
    manager = SimpleNamespace(stream=_Stream(7))
    trees: Any = ModuleType(_TREES)
    trees.local = threading.local()
    trees.local.tree_manager_containers = {0: SimpleNamespace(tree_manager=manager)}
    monkeypatch.setitem(sys.modules, _TREES, trees)
    return SimpleNamespace(streams=streams, default=default, manager=manager, trees=trees)


def test_a_program_without_such_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, _TREES, raising=False)
    assert not ordinary.in_inductors_run()


def test_the_stream_tells(gpu: SimpleNamespace) -> None:
    assert not ordinary.in_inductors_run()
    gpu.streams.current = gpu.manager.stream
    assert ordinary.in_inductors_run()
    gpu.trees.local.tree_manager_containers[0].tree_manager = None  # all its functions are gone
    assert not ordinary.in_inductors_run()


def test_a_thread_without_a_manager(gpu: SimpleNamespace) -> None:
    """Only threads of autograd inherit the manager; others have none, and the question is no
    error.
    """
    answers: list[bool] = []

    def ask() -> None:
        gpu.streams.current = gpu.manager.stream
        answers.append(ordinary.in_inductors_run())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [False]


def test_pytorch_has_what_is_asked_for() -> None:
    """The names that :mod:`interlace.comm.runtime.ordinary` reads in PyTorch."""
    from torch._inductor import cudagraph_trees

    assert isinstance(cudagraph_trees.local.tree_manager_containers, dict)
    assert cudagraph_trees.TreeManagerContainer(0).tree_manager is None
    assert callable(torch._C._is_key_in_tls)
    assert callable(torch._C._get_obj_in_tls)


def test_lasting_tensors_are_made_apart(gpu: SimpleNamespace) -> None:
    """Also in inference mode, and with what the caller's context says."""
    setting = contextvars.ContextVar("setting", default="")
    setting.set("the caller's")
    threads: list[threading.Thread] = []

    @makes_ordinary_tensors
    def make(value: float) -> torch.Tensor:
        threads.append(threading.current_thread())
        assert setting.get() == "the caller's"
        return torch.full((2,), value)

    make(1.0)
    gpu.streams.current = gpu.manager.stream
    with torch.inference_mode():
        y = make(2.0)
    assert y.tolist() == [2.0, 2.0]
    assert not y.is_inference()
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()
    assert gpu.default.waited == [gpu.manager.stream]
    assert gpu.default.synchronized == 1


def test_errors_come_back(gpu: SimpleNamespace) -> None:
    def fail() -> None:
        raise interlace.WorkspaceError("does not fit")

    with pytest.raises(interlace.WorkspaceError, match="does not fit"):
        ordinary.call_apart(fail)


def test_a_group_makes_no_graph_there(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = Replays(torch.device("cpu"))
    monkeypatch.setattr(replays, "is_enabled", True)
    gpu.streams.current = gpu.manager.stream
    calls: list[int] = []
    for turn in range(3):
        assert replays.run("key", lambda turn=turn: calls.append(turn), with_libraries=False)
    assert calls == [0, 1, 2]
    assert not replays._candidates


def test_results_are_no_symmetric_memory_there(gpu: SimpleNamespace) -> None:
    group = Group(None, torch.device("cpu"))
    assert group.outputs.take(4096).lent
    gpu.streams.current = gpu.manager.stream
    output = group.outputs.take(4096)
    assert output.destination.own_index == LANDING
    assert not output.lent


def test_operators_that_graphs_may_hold() -> None:
    """An operator is left out only if its calls need the host each time."""
    unsafe = torch.Tag.cudagraph_unsafe
    ops = torch.ops.interlace
    kept_out = {
        f"{name}.{overload}"
        for name in dir(ops)
        if isinstance(getattr(ops, name), torch._ops.OpOverloadPacket)
        for overload in getattr(ops, name).overloads()
        if unsafe in getattr(getattr(ops, name), overload).tags
    }
    assert kept_out == {
        "embedding_all_to_all.default",
        "embedding_all_to_all_gradient.default",
        "embedding_all_to_all_update.default",
        "gemm_all_to_all.exchanged",
        "mixture_of_experts.default",
        "mixture_of_experts_backward.default",
    }


def _capture(group: Group, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(group.streams, "capturing", lambda: True)
    patch.setattr(group.streams, "capture_id", lambda: 7)


def _workspaces() -> list[bool]:
    """Whether each call gets the workspace that is expected, on a rank that captures or not."""
    group, name = group_of(dist.new_group()), "an operator"
    first = group.workspace(name, 1 << 14)
    second = group.workspace(name, 1 << 16)  # nothing was captured, so the first one has gone
    answers = [group.workspace(name, 1 << 14) is second]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            _capture(group, patch)
        answers.append(group.workspace(name, 1 << 14) is second)
    third = group.workspace(name, 1 << 20)
    # Rank 0 replays what it has captured, and its peers enqueue: in the same memory.
    answers += [
        group.workspace(name, 1 << 14) is second,
        group.workspace(name, 1 << 20) is third,
        group.workspace(name, 1 << 16, 1 << 12) is not second,
        first not in (second, third),
    ]
    group.release()
    return answers


def test_a_call_gets_the_memory_that_a_peer_has_captured(ranks: Any) -> None:
    for answers in ranks(2).run(_workspaces):
        assert all(answers), answers


def _outputs() -> list[bool]:
    group = group_of(dist.new_group())
    first = group.outputs.landing(1 << 14)._space
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            _capture(group, patch)
        answers = [group.outputs.landing(1 << 14)._space is first]
    second = group.outputs.landing(1 << 20)._space
    answers += [
        second is not first,
        group.outputs.take(1 << 14)._space is first,
        group.outputs.take(1 << 20)._space is second,
    ]
    group.release()
    return answers


def test_outputs_that_a_peer_has_captured(ranks: Any) -> None:
    for answers in ranks(2).run(_outputs):
        assert all(answers), answers
