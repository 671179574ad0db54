"""The watch that gives slices on a GPU a deadline, without a GPU: clock and driver are made up."""

import gc
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import interlace
from interlace.comm import carrier as carrier_module
from interlace.comm import network as module
from interlace.comm.carrier import Carrier
from interlace.comm.cpu_faults import Traffic
from interlace.comm.health import Health
from interlace.comm.members import Members
from interlace.comm.network import Watch
from interlace.comm.replays import Replays
from interlace.comm.streams import Streams

RELEASED = [
    ("broken", "operator", -1),
    ("write", 0x10, 2**31 - 1),
    "abort",
    ("write", 0x20, 2**31 - 1),
    ("write", 0x24, 2**31 - 1),
]
"""What is done to a group whose call is late, in this order."""


class _Machine:
    """A watch whose streams, driver, clock and group say in ``log`` what is done to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 100.0, []
        self.watch = watch = Watch.__new__(Watch)
        watch._view = np.array([-1, 0], dtype=np.int32)
        watch.operator, watch._seen, watch._since = "operator", -2, 0.0
        watch._stopped = threading.Event()
        watch._health = SimpleNamespace(
            deadline_s=10.0, broken=False, broken_address=0x10, declare_broken=self._declare,
            explain=self._explain,
        )  # fmt: skip
        watch._channel = SimpleNamespace(first_not_waiting=lambda operator, seconds: 3)
        watch._members = SimpleNamespace(device="device")
        watch._network = SimpleNamespace(
            counter_addresses=lambda: [0x20, 0x24], carrier=SimpleNamespace(abort=self._abort)
        )
        monkeypatch.setattr(module, "writer", lambda device: nullcontext(self._write))
        monkeypatch.setattr(
            module,
            "time",
            SimpleNamespace(monotonic=lambda: self.now, sleep=lambda s: aborted.wait(5)),
        )
        aborted = self.aborted = threading.Event()
        self.explained, self.late = threading.Event(), None

    def _declare(self, operator, peer, slice, *, is_explained):
        assert not is_explained
        self.log.append(("broken", operator, peer))

    def _explain(self, late):
        self.late = late
        self.explained.set()

    def _abort(self):
        self.log.append("abort")
        self.aborted.set()

    def _write(self, address, value):
        self.log.append(("write", address, value))

    def look(self, begun, ended, after_s):
        """Let time pass, and look at the two numbers."""
        self.now += after_s
        self.watch._view[:] = begun, ended
        return self.watch._look()


def test_calls_that_follow_one_another_are_not_late(monkeypatch):
    machine = _Machine(monkeypatch)
    for number in range(20):
        machine.look(number, number, 6.0)  # under way
        machine.look(number, number, 3.0)
        machine.look(number, number + 1, 60.0)  # idle for long
    assert machine.log == []
    assert not machine.watch._stopped.is_set()


def test_a_late_call_breaks_the_group_and_lets_every_stream_go(monkeypatch):
    """First the flag at which waits end, then the abort, and the counters last: nothing incomplete
    is sent.
    """
    machine = _Machine(monkeypatch)
    assert machine.look(5, 5, 1.0) == 0.25
    machine.look(5, 5, 9.0)
    assert machine.log == []
    machine.look(5, 5, 2.0)
    assert machine.log == RELEASED
    assert machine.watch._stopped.is_set()
    assert machine.explained.wait(5)
    assert machine.late == 3


@pytest.mark.parametrize("ends", [True, False])
def test_nothing_that_explains_stops_what_releases(monkeypatch, ends):
    """The store is gone with the rank that is late, or does not answer."""
    machine, going_on = _Machine(monkeypatch), threading.Event()

    def ask(operator, seconds):
        if not ends:
            going_on.wait(30)
        raise ConnectionError("the store is gone")

    machine.watch._channel.first_not_waiting = ask
    monkeypatch.setattr(threading, "excepthook", lambda what: None)
    machine.look(5, 5, 1.0)
    machine.look(5, 5, 11.0)
    assert machine.log == RELEASED
    assert machine.explained.is_set() <= ends
    going_on.set()
    assert machine.explained.wait(5)
    assert machine.late == -1


@pytest.mark.parametrize(
    ("step", "left"),
    [
        ("declare", RELEASED[1:]),
        ("writer", [RELEASED[0], "abort"]),
        ("flag", [RELEASED[0], *RELEASED[2:]]),
        ("abort", [*RELEASED[:2], *RELEASED[3:]]),
        ("counter", [*RELEASED[:3], RELEASED[4]]),
    ],
)
def test_a_step_that_fails_stops_no_other(monkeypatch, step, left):
    machine = _Machine(monkeypatch)

    def fail(*arguments, **options):
        raise RuntimeError(step)

    def write(address, value):
        if address == {"flag": 0x10, "counter": 0x20}.get(step):
            fail()
        machine._write(address, value)

    monkeypatch.setattr(module, "writer", lambda device: nullcontext(write))
    if step == "declare":
        machine.watch._health.declare_broken = fail
    elif step == "writer":
        monkeypatch.setattr(module, "writer", fail)
    elif step == "abort":
        machine.aborted.set()
        machine.watch._network.carrier = SimpleNamespace()
    machine.look(5, 5, 1.0)
    with pytest.raises((RuntimeError, AttributeError)):
        machine.look(5, 5, 11.0)
    assert machine.log == left


def test_an_error_waits_for_its_explanation():
    device = torch.device("cpu")
    members = Members("", 0, 2, device)
    health = Health(members, Streams(device), Replays(device), Traffic())
    health.declare_broken("operator", -1, 1, is_explained=False)
    threading.Timer(0.2, health.explain, (1,)).start()
    with pytest.raises(interlace.PeerTimeoutError, match="for rank 1 "):
        health.check()
    # What comes after the group was reset says nothing of the next failure.
    health.declare_broken("operator", -1, 1, is_explained=False)
    health.reset()
    health.explain(1)
    assert not health.broken
    health.check()


def test_a_failure_that_a_kernel_has_found_is_not_replaced(monkeypatch):
    machine = _Machine(monkeypatch)
    machine.watch._health.broken = True
    machine.look(5, 5, 1.0)
    machine.look(5, 5, 11.0)
    assert machine.log == RELEASED[1:]


def test_a_network_that_goes_drops_the_graphs_first(monkeypatch):
    """NCCL ends no communicator whose kernels a graph has, whoever ends it."""
    log = []
    carrier = SimpleNamespace(abort=lambda: log.append("abort"))
    replays = SimpleNamespace(clear=lambda: log.append("clear"))
    monkeypatch.setattr(module, "Carrier", lambda *arguments: carrier)
    members = SimpleNamespace(backend="cpu", device=torch.device("cpu"))
    health = SimpleNamespace(deadline_s=1.0)
    channel = SimpleNamespace(new_store=lambda name: None)

    network = module.Network(members, health, channel, replays)
    del network
    gc.collect()
    assert log == ["clear", "abort"]

    log.clear()
    network = module.Network(members, health, channel, replays)
    network.close()
    del network
    gc.collect()
    assert log == ["abort"]


def test_a_communicator_that_a_graph_keeps_is_left_behind(monkeypatch):
    """The program keeps a graph with slices while its group recovers."""
    monkeypatch.setattr(carrier_module, "_ABORT_S", 0.1)
    graph_is_gone, ended = threading.Event(), threading.Event()

    def abort():
        graph_is_gone.wait(10)
        ended.set()

    carrier = Carrier.__new__(Carrier)
    carrier._on_gpu, carrier._backends = True, [SimpleNamespace(abort=abort)]
    carrier.abort()
    assert not ended.is_set()
    graph_is_gone.set()
    assert ended.wait(5)
    # An error of NCCL is no news: the communicator is given up.
    backend = SimpleNamespace(abort=mock.Mock(side_effect=RuntimeError("NCCL")))
    carrier._backends = [backend]
    carrier.abort()
    backend.abort.assert_called_once()
