"""When memory that finalizers give back is unmapped. The GPU is made up; tests/gpu has real
captures.
"""

from __future__ import annotations

import threading

import pytest
import torch

from interlace.comm.replay import memory as module
from interlace.comm.replay.memory import FreeList, ReleaseQueue

GPU, OTHER_GPU, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


class _Machine:
    """What happens to the GPUs, in order; and whether the current stream is being captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.capturing, self.broken = False, False
        monkeypatch.setattr(module, "_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)

    def _synchronize(self, device: torch.device) -> None:
        if self.broken:
            raise RuntimeError("the device is lost")
        self.done.append(f"wait for {device}")

    def release(self, name: str) -> None:
        self.done.append(name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    return _Machine(monkeypatch)


def test_the_gpu_is_idle_before_its_memory_goes(machine: _Machine) -> None:
    queue = ReleaseQueue()
    queue.put(GPU, lambda: machine.release("a"))
    queue.put(CPU, lambda: machine.release("b"))
    assert machine.done == ["wait for cuda:0", "a", "b"]
    assert not queue


def test_nothing_waits_for_a_gpu_during_a_capture(machine: _Machine) -> None:
    queue = ReleaseQueue()
    machine.capturing = True
    for name in ("a", "b"):
        queue.put(GPU, lambda name=name: machine.release(name))
    queue.put(OTHER_GPU, lambda: machine.release("c"))
    queue.empty()
    assert machine.done == []
    machine.capturing = False
    queue.empty()
    assert machine.done == ["wait for cuda:0", "a", "b", "wait for cuda:1", "c"]


def test_releases_can_be_put_off(machine: _Machine) -> None:
    queue = ReleaseQueue()
    with queue.put_off():
        with queue.put_off():
            queue.put(GPU, lambda: machine.release("a"))
        queue.empty()
        assert machine.done == []
    queue.empty()
    assert machine.done == ["wait for cuda:0", "a"]


def test_a_gpus_memory_waits_for_the_main_thread(machine: _Machine) -> None:
    """What the main thread captures meanwhile, another one cannot know."""
    queue = ReleaseQueue()
    thread = threading.Thread(target=queue.put, args=(GPU, lambda: machine.release("a")))
    thread.start()
    thread.join()
    assert machine.done == []
    queue.empty()
    assert machine.done == ["wait for cuda:0", "a"]


def test_a_finalizer_that_interrupts_a_release_comes_after_it(machine: _Machine) -> None:
    queue = ReleaseQueue()

    def first() -> None:
        queue.put(CPU, lambda: machine.release("second"))
        machine.release("first")

    queue.put(CPU, first)
    assert machine.done == ["first", "second"]


def test_an_error_is_raised_and_the_rest_is_done_later(machine: _Machine) -> None:
    queue = ReleaseQueue()

    def fail() -> None:
        raise OSError("cannot be unmapped")

    with queue.put_off():
        queue.put(CPU, fail)
        queue.put(CPU, lambda: machine.release("a"))
    with pytest.raises(OSError, match="cannot be unmapped"):
        queue.empty()
    queue.empty()
    assert machine.done == ["a"]


def test_memory_of_a_gpu_that_cannot_be_waited_for_is_kept(machine: _Machine) -> None:
    queue = ReleaseQueue()
    machine.broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is lost"):
            queue.put(GPU, lambda: machine.release("a"))
    assert len(queue) == 2
    assert machine.done == []


def test_a_finalizer_may_come_while_a_list_of_free_memory_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory of the same list is given back in the middle of a search, and is free when the search
    is over.
    """
    spans = FreeList(100)
    assert spans.take(40) == 0

    class _Search(list[tuple[int, int]]):
        def __iter__(self):
            module.releases.put(CPU, lambda: spans.give(0, 40))
            return super().__iter__()

    monkeypatch.setattr(spans, "_free", _Search(spans._free))
    assert spans.take(10) == 40
    assert len(module.releases) == 1
    module.releases.empty()
    assert spans.take(40) == 0
