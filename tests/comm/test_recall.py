"""Calls that are found by their operands alone; what graphs do is tested on GPUs
(tests/gpu/test_replays_gpu.py).
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from interlace.comm.groups.group import Group
from interlace.comm.replay import replays, tapes
from interlace.comm.replay.deferred import DeferredCall, New, addresses
from interlace.comm.replay.memory import releases
from interlace.comm.replay.replays import KeptMemory
from interlace.comm.runtime import context as ctx
from interlace.comm.runtime.streams import launches


class _Graph:
    """What was captured, done again by each replay."""

    def __init__(self, enqueue: Callable[[], object]) -> None:
        self._enqueue = enqueue

    def replay(self) -> None:
        self._enqueue()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """A group on the CPU that makes graphs as on a GPU."""
    made = Group(None, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(made.replays, "is_enabled", True)
    monkeypatch.setattr(made.replays, "_capture", _Graph)
    monkeypatch.setattr(made.streams, "continues", lambda: True)
    # Nothing here is a kernel, so it does not matter whether the interpreter runs kernels.
    monkeypatch.setattr(made, "running", contextlib.nullcontext)
    return made


class _Doubling:
    """A call that doubles a tensor, and says how it was done."""

    def __init__(self, group: Group) -> None:
        self.group, self.done, self.place = group, [], torch.zeros(4)

    def __call__(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        recalled = self.group.recall(x.data_ptr())
        self.done.append("long" if recalled is None else "recalled")
        if recalled is not None:
            return recalled
        # The memory of the result is the same each time, as it would be with torch's allocator.
        take = settings.pop("take", lambda _: (self.place,))

        def prepare(y: torch.Tensor) -> Callable[[], None]:
            return lambda: y.copy_(2 * x)

        return self.group.perform(
            DeferredCall((x.data_ptr(),), take, prepare, **settings), x.data_ptr()
        )


def test_a_call_that_was_a_graph_is_found_by_its_operands(group: Group) -> None:
    double, x = _Doubling(group), torch.zeros(4)
    for value in range(5):
        x.fill_(value)
        assert double(x).tolist() == [2 * value] * 4
    assert double.done == ["long", "long", "recalled", "recalled", "recalled"]
    other = torch.ones(4)
    assert double(other).tolist() == [2] * 4
    assert double.done[-1] == "long"


def test_with_other_memory_than_any_graph_has_a_call_takes_the_long_way(group: Group) -> None:
    double, x = _Doubling(group), torch.ones(4)
    for _ in range(4):
        double(x)
    double.place = torch.zeros(4)
    assert double(x) is double.place
    assert double.place.tolist() == [2] * 4
    assert double.done[-2:] == ["recalled", "long"]


@pytest.mark.parametrize("places", [1, 2, 4])
def test_memory_of_a_few_places_is_as_many_graphs(group: Group, places: int) -> None:
    """Also where calls have a short way, which they take unless one is to become a graph."""
    double, x = _Doubling(group), torch.ones(4)
    memory = [torch.zeros(4) for _ in range(places)]
    for turn in range(24):
        double.place = memory[turn % places]
        if group.recall(x.data_ptr()) is None and not group.replays.comes_again(x.data_ptr()):
            double.done.append("short")
            continue
        double(x)
    assert double.done == [
        *["short"] * 7,
        *["long"] * 2 * places,
        *["recalled"] * (17 - 2 * places),
    ]
    assert len(group.replays) == places


def test_what_moves_on_when_work_is_enqueued_is_remembered_as_it_was_before(group: Group) -> None:
    """A mapped output has two places in turn, and a graph is of the one that was captured."""
    x, y, turns, used = torch.ones(4), torch.zeros(4), [0], []

    def prepare(_: torch.Tensor) -> Callable[[], None]:
        turn = turns[0]

        def enqueue() -> None:
            used.append(turn)
            turns[0] = 1 - turn

        return enqueue

    work = DeferredCall(("moves on",), lambda _: (y,), prepare, where=lambda _: turns[0])
    ways = []
    for _ in range(8):
        ways.append(group.recall(x.data_ptr()) is not None)
        if not ways[-1]:
            group.perform(work, x.data_ptr())
    assert ways == [False] * 4 + [True] * 4
    assert used == [0, 1] * 4


def test_memory_that_is_never_the_same_is_no_graph(group: Group) -> None:
    double, x = _Doubling(group), torch.ones(4)
    kept = [double(x, take=New.like(x, [4])) for _ in range(5)]
    assert double.done == ["long"] * 5
    assert all(y.tolist() == [2] * 4 for y in kept)


@pytest.mark.parametrize(
    ("sizes", "graphs", "kept"),
    [
        ((60, 30, 60), [60, 30, 60], 60),
        ((60, 41, 61), [60, 41], 60),
        ((30, 60, 70, 10, 0), [30, 60, 10, 0], 90),
        ((101, 0, 100), [0, 100], 100),
    ],
)
def test_graphs_keep_a_share_of_memory_for_what_calls_take_for_themselves(
    group: Group, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], graphs: list[int],
    kept: int,
) -> None:  # fmt: skip
    """A call that takes no more of it than one before finds it there."""
    memory = KeptMemory(most=100)
    monkeypatch.setattr(replays, "_kept_memory", lambda device: memory)
    calls = [(_Doubling(group), torch.ones(4), nbytes) for nbytes in sizes]
    for double, x, nbytes in calls:
        for _ in range(4):
            assert double(x, temporary_bytes=nbytes).tolist() == [2] * 4
    assert [nbytes for double, _, nbytes in calls if double.done[-1] == "recalled"] == graphs
    assert memory.kept == kept


def test_work_on_copies_of_operands_is_not_remembered(group: Group) -> None:
    """The copies are made outside of the graph, in each call."""
    double, x = _Doubling(group), torch.ones(4)
    for _ in range(5):
        double(x, is_of_operands=False)
    assert double.done == ["long"] * 5


@pytest.mark.parametrize("obstacle", ["forgotten", "cleared", "capture", "stream", "release"])
def test_what_must_be_done_before_a_call_is_not_passed_over(
    group: Group, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    double, x = _Doubling(group), torch.ones(4)
    for _ in range(4):
        double(x)
    assert double.done[-1] == "recalled"
    if obstacle == "forgotten":
        group.replays.forget()
    elif obstacle == "cleared":
        group.replays.clear()
    elif obstacle == "capture":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    elif obstacle == "stream":
        monkeypatch.setattr(group.streams, "continues", lambda: False)
    else:
        with releases.put_off():
            releases.put(torch.device("cpu"), lambda: None)
            assert double(x).tolist() == [2] * 4
            assert double.done[-1] == "long"
        releases.empty()
        double(x)
        assert double.done[-1] == "recalled"
        return
    assert double(x).tolist() == [2] * 4
    assert double.done[-1] == "long"


def test_a_call_like_an_earlier_one(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    def again(*arguments: Any) -> torch.Tensor | None:
        made.append(arguments)
        return None if arguments[2] is None else arguments[2] + 1

    group.replays.remember_form("form", again)
    x = torch.ones(4)
    assert group.recall_form("form", "call", x).tolist() == [2] * 4
    assert made == [(group, "call", x)]
    assert group.recall_form("form", "call", None) is None
    assert group.recall_form("another form", "call", x) is None
    group.health.declare_broken("call", 0)
    assert group.recall_form("form", "call", x) is None
    group.health.reset()
    monkeypatch.setattr(group.streams, "continues", lambda: False)
    assert group.recall_form("form", "call", x) is None
    monkeypatch.undo()
    group.replays.forget()
    assert group.recall_form("form", "call", x) is None


def test_what_comes_again_may_become_a_graph(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    comes_again = group.replays.comes_again
    for call in ("a", "b", None):
        assert not any(comes_again(call) for _ in range(7))
    assert comes_again("a")
    assert not comes_again(None)
    # Nothing more becomes a graph while as many as are kept are in use.
    monkeypatch.setattr(replays, "_MAX_GRAPHS", 0)
    monkeypatch.setattr(group.replays, "_full_until", 1)
    assert not comes_again("a")
    monkeypatch.undo()
    # Of calls that came once the oldest are forgotten first.
    monkeypatch.setattr(replays, "_MAX_CANDIDATES", 2)
    assert not comes_again("c")
    assert comes_again("b")
    assert not comes_again("a")


def test_what_never_becomes_a_graph_is_seldom_tried_again(group: Group) -> None:
    tried = [count for count in range(1, 40) if group.replays.comes_again("a")]
    assert tried == [*range(8, 24), *range(32, 40)]
    assert not any(group.replays.comes_again("a") for _ in range(24))
    assert group.replays.comes_again("a")


def test_a_call_that_is_recorded_is_to_become_no_graph(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(group.replays.comes_again("a") for _ in range(7))
    with monkeypatch.context() as patch:
        patch.setattr(tapes._thread, "recorder", tapes.CallRecorder(()))
        assert not group.replays.comes_again("a")
    assert group.replays.comes_again("a")


@pytest.mark.parametrize("obstacle", ["none", "broken", "capture", "stream", "release"])
def test_a_call_that_is_recorded_passes_over_nothing_that_must_be_done_before(
    group: Group, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    """Neither by its graph, where calls of its form are no recording, nor by its form."""
    double, x = _Doubling(group), torch.ones(4)
    known = ("form", addresses(x))
    work = DeferredCall(("key",), lambda _: (double.place,), lambda y: lambda: y.copy_(2 * x))
    for _ in range(3):
        group.perform(work, known)
    ways: list[str] = []
    group.replays.remember_form("form", lambda *_: ways.append("form"))
    monkeypatch.setattr(_Graph, "replay", lambda _: ways.append("graph"))
    recorder = tapes.CallRecorder(())
    monkeypatch.setattr(tapes._thread, "recorder", recorder)
    if obstacle == "broken":
        group.health.declare_broken("double", 0)
    elif obstacle == "capture":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    elif obstacle == "stream":
        monkeypatch.setattr(group.streams, "continues", lambda: False)
    with releases.put_off():
        if obstacle == "release":
            releases.put(torch.device("cpu"), lambda: None)
        for _ in range(3):
            group.recall_known(known, x)
    releases.empty()
    assert ways == (["form", "graph", "graph"] if obstacle == "none" else [])


def test_a_broken_group_is_found_out(group: Group) -> None:
    double, x = _Doubling(group), torch.ones(4)
    for _ in range(4):
        double(x)
    group.health.declare_broken("double", 0)
    assert group.recall(x.data_ptr()) is None
    group.health.reset()
    assert group.recall(x.data_ptr()) is not None


def test_an_interrupted_replay_breaks_the_group(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, x = _Doubling(group), torch.ones(4)
    for _ in range(4):
        double(x)
    monkeypatch.setattr(group.members, "world_size", 2)

    def interrupt(_: _Graph) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Graph, "replay", interrupt)
    with pytest.raises(KeyboardInterrupt):
        group.recall(x.data_ptr())
    assert group.health._record_view[ctx.RECORD_CODE] == ctx.INTERRUPTED


def test_a_replay_counts_as_a_launch_and_is_counted_by_its_work(group: Group) -> None:
    counted: list[tuple[Group, torch.Tensor]] = []
    double, x = _Doubling(group), torch.ones(4)
    before = launches.value
    for _ in range(5):
        double(x, replayed=lambda *arguments: counted.append(arguments))
    # The second call is captured: what its host code counts, it has counted.
    assert [each[0] for each in counted] == [group] * 3
    assert all(each[1] is double.place for each in counted)
    assert launches.value - before == 4


def test_operands_are_not_kept_alive(group: Group) -> None:
    double = _Doubling(group)
    x = torch.ones(4)
    gone = weakref.ref(x)
    for _ in range(4):
        double(x)
    assert double.done[-1] == "recalled"
    # The graphs here are closures; a CUDA graph knows an address alone.
    for replayable in group.replays._graphs.values():
        replayable.graph = None
    del x
    gc.collect()
    assert gone() is None
