"""The watch that gives slices on a GPU a deadline, without a GPU: clock and driver are made up."""

import gc
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm.cpu.cpu_faults import Traffic
from interlace.comm.groups import carrier as carrier_module
from interlace.comm.groups import network as module
from interlace.comm.groups.carrier import Carrier
from interlace.comm.groups.network import Watch
from interlace.comm.host.health import Health
from interlace.comm.host.members import Members
from interlace.comm.replay.replays import Replays
from interlace.comm.runtime import context as ctx
from interlace.comm.runtime.streams import Streams
from tests.errors import error_of

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
        watch._channel = SimpleNamespace(first_not_waiting=lambda: 3)
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

    def ask():
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
    monkeypatch.setattr(carrier_module, "ABORT_S", 0.1)
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


def _waits_for_a_rank_that_waits():
    """Rank 2 is late; rank 1 waits for it between nodes, and rank 0 for rank 1 within a node: what
    rank 0's kernel has recorded and its error says, and what rank 0 finds if rank 1 is late.
    """
    group = interlace.group_of(dist.new_group())
    rank, health, found = dist.get_rank(), group.health, None
    health.trace_by(group.channel.first_late)
    group.deadline_s = 8.0
    if rank == 0:
        context = group.context("gemm_reduce_scatter")
        fields = health._record_view
        fields[ctx.RECORD_OPERATOR] = context[ctx.OPERATOR]
        fields[ctx.RECORD_PEER], fields[ctx.RECORD_WANTED] = 1, 7
        fields[ctx.RECORD_CODE] = ctx.LATE
        found = [error_of(group.check) for _ in range(2)]
    elif rank == 1:
        found = group.channel.first_not_waiting()
    dist.barrier()
    return found


def test_the_rank_that_is_late_first_is_named(ranks):
    """Not the one between them, whom a kernel of the same node has waited for."""
    errors, seen_by_rank_1, _ = ranks(3).run(_waits_for_a_rank_that_waits)
    for kind, message, fields in errors:
        assert "for rank 2 (through rank 1: slice 0, epoch 7, and saw epoch 0)" in message
        assert (kind, fields["peer"], fields["through"]) == ("PeerTimeoutError", 2, 1)
    assert seen_by_rank_1 == 2
