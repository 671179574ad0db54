"""Which GPUs a group may have, and the order of its calls on one. The GPUs are made up; tests/gpu
has real ones.
"""

from __future__ import annotations

import ctypes
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace import BackendError, GroupError, WorkspaceError
from interlace.comm.groups.group import Group
from interlace.comm.host.members import Members, check_gpus
from interlace.comm.runtime import streams as module
from interlace.comm.runtime.deadlines import default_deadline_s
from interlace.comm.runtime.streams import Streams


def _members(
    monkeypatch: pytest.MonkeyPatch, visible: list[str], current: int = 0, rank: int = 0
) -> Members:
    """A group of cuda:``current``, in a process that sees the GPUs ``visible``; the third and
    fourth have no links.
    """
    properties = [SimpleNamespace(uuid=uuid) for uuid in visible]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: properties[torch.device(device).index]
    )
    monkeypatch.setattr(
        torch.cuda,
        "can_device_access_peer",
        lambda a, b: a != b and "c" not in (visible[a], visible[b]),
    )
    return Members("", rank, 4, torch.device("cuda", current))


def _check_gpus(members: Members, gpus: list[str]) -> float:
    """Count the ranks per GPU, as a group does when it is made; the deadline that follows."""
    members.ranks_per_gpu = check_gpus(members, gpus)
    return default_deadline_s(members.ranks_per_gpu)


def _require_own_gpus(members: Members) -> None:
    group: Any = SimpleNamespace(members=members)
    Group.require_own_gpus(group, "a measurement")


def test_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    members = _members(monkeypatch, ["a", "b"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deadline_s = _check_gpus(members, ["a", "b"])
    _require_own_gpus(members)
    assert (members.ranks_per_gpu, deadline_s) == (1, 30.0)


def test_gpus_are_told_apart_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank sees its own GPU only, as cuda:0; the driver says whether it can map the other's
    memory.
    """
    members = _members(monkeypatch, ["b"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check_gpus(members, ["a", "b"])
    assert members.ranks_per_gpu == 1


def test_gpus_without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    members = _members(monkeypatch, ["c", "a"], current=1)
    with pytest.raises(
        GroupError,
        match=r"cuda:1 cannot reach cuda:0 of rank 2\. `interlace doctor` shows the links",
    ):
        _check_gpus(members, ["a", "a", "c"])


@pytest.mark.parametrize(("setting", "deadline_s"), [("", 90.0), ("30", 30.0)])
def test_ranks_that_share_gpus(
    monkeypatch: pytest.MonkeyPatch, setting: str, deadline_s: float
) -> None:
    monkeypatch.setenv("INTERLACE_DEADLINE_S", setting)
    members = _members(monkeypatch, ["a", "b"])
    with pytest.warns(
        UserWarning,
        match=r"^4 ranks share 2 GPUs by time slices\. Results are right; times mean nothing\.$",
    ):
        default_s = _check_gpus(members, ["a", "b", "a", "a"])
    assert (members.ranks_per_gpu, default_s) == (3, deadline_s)
    with pytest.raises(
        BackendError, match=r"^a measurement must have a GPU for each rank; got 3 ranks on one\."
    ):
        _require_own_gpus(members)


def test_a_limit_of_processors_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS was seen to leave parts of products unwritten under it."""
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "45")
    members = _members(monkeypatch, ["a", "b"])
    with pytest.warns(UserWarning, match=r"^CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set\."):
        _check_gpus(members, ["a", "b"])
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check_gpus(members, ["a", "b"])


def test_only_one_rank_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    members = _members(monkeypatch, ["a"], rank=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check_gpus(members, ["a", "a"])


class _Stream:
    """Stands in for torch's: which streams it waits for, and the graph that it is captured in."""

    def __init__(self) -> None:
        self.waits: list[_Stream] = []
        self.graph: int | None = None

    def wait_stream(self, other: _Stream) -> None:
        self.waits.append(other)


class _Calls:
    """Calls of several groups of one GPU, each on a stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_capture_of", lambda stream: stream.graph)
        self.order = module.StreamOrder()
        self.groups = [object.__new__(Streams) for _ in range(2)]

    def call(self, which: int, stream: _Stream) -> list[_Stream]:
        """The streams that the call's stream has waited for."""
        group: Any = self.groups[which]
        group._order = self.order
        group.current, group.capture_id = (lambda: stream), (lambda: stream.graph)
        before = len(stream.waits)
        group.follow_last_call()
        return stream.waits[before:]


def test_calls_of_all_groups_of_a_gpu_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, a, b = _Calls(monkeypatch), _Stream(), _Stream()
    assert calls.call(0, a) == []
    assert calls.call(1, a) == []
    assert calls.call(1, b) == [a]
    assert calls.call(0, b) == []
    assert calls.call(0, a) == [b]


def test_calls_of_one_graph_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, a, b, c = _Calls(monkeypatch), _Stream(), _Stream(), _Stream()
    calls.call(0, a)
    b.graph = c.graph = 1
    assert calls.call(0, b) == []
    assert calls.call(1, c) == [b]
    a.graph = 1
    assert calls.call(0, a) == []
    assert calls.call(0, b) == [a, c]


def test_calls_that_run_follow_one_another_beside_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, a, b, c = _Calls(monkeypatch), _Stream(), _Stream(), _Stream()
    calls.call(0, a)
    b.graph = 1
    calls.call(0, b)
    assert calls.call(1, c) == [a]
    b.graph = None
    assert calls.call(0, b) == [c]


def test_a_call_cannot_follow_one_whose_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, a, b = _Calls(monkeypatch), _Stream(), _Stream()
    calls.call(0, a)
    a.graph = 1
    with pytest.raises(
        WorkspaceError,
        match=r"^calls on one GPU must be ordered; got one while the stream of the last one",
    ):
        calls.call(1, b)


def test_what_is_uploaded_is_there_for_later_calls_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy is the driver's, follows the last call, and is what the next one follows."""
    calls, a, b, c = _Calls(monkeypatch), _Stream(), _Stream(), _Stream()
    calls.call(0, a)
    streams: Any = calls.groups[1]
    streams.on_gpu, streams.device = True, torch.device("cpu")
    streams._order, streams.current = calls.order, lambda: b
    streams.capture_id = lambda: None
    b.cuda_stream = 7  # type: ignore[attr-defined]
    made: list[tuple[int, list[Any]]] = []

    def copy(target: int, source: int, nbytes: int, stream: int) -> tuple[int]:
        made.append((stream, list(b.waits)))
        ctypes.memmove(target, source, nbytes)
        return (0,)

    monkeypatch.setattr(module, "driver", lambda: SimpleNamespace(cuMemcpyHtoDAsync=copy))
    assert streams.upload([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert made == [(7, [a])]
    assert calls.call(0, c) == [b]


def test_what_is_uploaded_to_a_cpu_is_a_tensor() -> None:
    made = Streams(torch.device("cpu")).upload([[1, 2], [3, 4]])
    assert made.dtype == torch.int64
    assert made.tolist() == [[1, 2], [3, 4]]


def test_the_groups_gpu_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: chosen.append(device))
    for number in (0, 1):
        Streams(torch.device("cuda", number)).on_device()
    assert chosen == [torch.device("cuda", 1)]
