"""Steps of slices take the lanes of a GPU's carrier in turn. The GPU's streams are replaced."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from interlace.comm.groups import carrier as carrier_module
from interlace.comm.groups import slices
from interlace.comm.groups.carrier import Carrier, Message
from interlace.comm.groups.slices import SliceQueue, Step, Trigger
from interlace.operators.embedding_all_to_all.config import (
    MOST_STAGES,
    EmbeddingAllToAllConfig,
    in_short_blocks,
)


class Stream:
    """Record what is enqueued, as the names of events and what waits for them."""

    def __init__(self, name: str) -> None:
        self.name, self.log = name, []

    def record_event(self) -> str:
        return f"{self.name} after {self.log[-1] if self.log else 'nothing'}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"event: {event}")


class Network:
    """Streams and a carrier of two lanes; knows which stream is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = self.on = Stream("main")
        self.lanes = [Stream("lane 0"), Stream("lane 1")]
        self.carrier = SimpleNamespace(lanes=2, exchange=self.exchange)
        self.group = SimpleNamespace(
            backend="cuda",
            device=None,
            streams=SimpleNamespace(
                current=lambda: self.main, side=lambda first, number: self.lanes[number]
            ),
            network=lambda: SimpleNamespace(carrier=self.carrier, watch=mock.Mock()),
            on_device=contextlib.nullcontext,
        )
        monkeypatch.setattr(slices, "supports_triggers", lambda device: True)
        monkeypatch.setattr(slices, "require_queues", lambda group, subject: None)
        monkeypatch.setattr(
            slices,
            "stream_waits_for",
            lambda counter, value, stream: stream.log.append(f"count {counter}: {value}"),
        )
        monkeypatch.setattr("torch.cuda.stream", self.using)

    @contextlib.contextmanager
    def using(self, stream: Stream):
        before, self.on = self.on, stream
        yield
        self.on = before

    def exchange(self, departures, arrivals, lane):
        self.on.log.append(f"exchange {departures[0].data} on lane {lane}")
        return [(-1, SimpleNamespace(wait=lambda: self.on.log.append("arrival")))]

    def queue(self, count: int, lanes: int | None = None) -> SliceQueue:
        steps = [
            Step((Trigger(100 + number, 7),), (Message(1, number),), (Message(1, number),))
            for number in range(count)
        ]
        return SliceQueue(self.group, "an operator", steps, 0, lanes)


def test_steps_take_lanes_in_turn(monkeypatch):
    network = Network(monkeypatch)
    queue = network.queue(3)
    queue.arm()
    queue.release(1)
    assert not network.lanes[1].log, "the second step's kernel may not have been launched"
    queue.release()
    start = "event: main after nothing"
    assert network.lanes[0].log == [
        start, "count 100: 7", "exchange 0 on lane 0", "arrival",
        start, "count 102: 7", "exchange 2 on lane 0", "arrival",
    ]  # fmt: skip
    assert network.lanes[1].log == [start, "count 101: 7", "exchange 1 on lane 1", "arrival"]


def test_a_wait_is_for_all_steps_up_to_one(monkeypatch):
    network = Network(monkeypatch)
    queue = network.queue(4)
    queue.arm()
    for number in range(4):
        queue.release(number + 1)
        # Each event has a name of its own.
        network.lanes[number % 2].log[-1] = f"arrival {number}"
        queue._arrived[number] = network.lanes[number % 2].record_event()
    of_lane = {number: f"event: lane {number % 2} after arrival {number}" for number in range(4)}
    for number, before in enumerate(([0], [0, 1], [1, 2], [2, 3])):
        network.main.log.clear()
        queue.wait(number)
        assert network.main.log == [of_lane[step] for step in before], number
    network.main.log.clear()
    queue.join()
    assert network.main.log == [of_lane[2], of_lane[3]]


def test_a_queue_may_have_one_lane(monkeypatch):
    network = Network(monkeypatch)
    queue = network.queue(3, lanes=1)
    queue.arm()
    queue.release()
    assert not network.lanes[1].log
    assert [entry for entry in network.lanes[0].log if "exchange" in entry] == [
        f"exchange {number} on lane 0" for number in range(3)
    ]
    queue.join()
    assert network.main.log == ["event: lane 0 after arrival"]


def test_both_communicators_are_aborted_though_one_hangs(monkeypatch):
    monkeypatch.setattr(carrier_module, "ABORT_S", 0.2)
    goes_on, aborted = threading.Event(), threading.Event()
    carrier = Carrier.__new__(Carrier)
    carrier._on_gpu = True
    carrier._backends = [
        SimpleNamespace(abort=lambda: goes_on.wait(10)), SimpleNamespace(abort=aborted.set)
    ]  # fmt: skip
    carrier.abort()
    assert aborted.is_set()
    goes_on.set()


def test_blocks_are_short_between_nodes():
    config = EmbeddingAllToAllConfig(block_bags=8, stages=3)
    assert in_short_blocks(config) == EmbeddingAllToAllConfig(block_bags=4, stages=4)
    one_bag = EmbeddingAllToAllConfig(block_bags=1)
    assert in_short_blocks(one_bag) == one_bag
    most = EmbeddingAllToAllConfig(block_bags=2, stages=MOST_STAGES)
    assert in_short_blocks(most).stages == MOST_STAGES
