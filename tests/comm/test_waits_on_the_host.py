"""Ctrl-C while a rank waits for others on the host: in the store, which Python cannot interrupt."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.comm.cpu.cpu_faults import Traffic
from interlace.comm.host import rendezvous
from interlace.comm.host.channel import HostChannel
from interlace.comm.host.health import Health
from interlace.comm.host.members import Members
from interlace.comm.host.rendezvous import wait_for_keys
from interlace.comm.replay.replays import Replays
from interlace.comm.runtime.streams import Streams

DEADLINE_S, INTERRUPT_S, SOON_S = 30.0, 1.0, 10.0


def test_keys_that_come_late_and_never(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    store.set("first", "")
    timer = threading.Timer(0.8, dist.FileStore(str(tmp_path / "store"), 1).set, ("second", ""))
    timer.start()
    assert wait_for_keys(store, ["first", "second"], SOON_S)
    timer.join()
    begun = time.monotonic()
    assert not wait_for_keys(store, ["first", "third"], 0.8)
    assert time.monotonic() - begun >= 0.8


@pytest.mark.parametrize(("comes_after", "is_late"), [(0.8, False), (1.2, True), (1.8, True)])
def test_an_exchange_lasts_one_deadline(
    monkeypatch: pytest.MonkeyPatch, comes_after: float, is_late: bool
) -> None:
    """By a clock that only sleeps let go on; the peer comes after a share of the deadline."""
    deadline_s, now = 100.0, 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now >= comes_after * deadline_s:
            store.set("0/1", '["label", 7]')

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(rendezvous, "INTERRUPT_S", 0.001)
    monkeypatch.setenv("INTERLACE_DEADLINE_S", str(deadline_s))
    device = torch.device("cpu")
    members, streams = Members("", 0, 2, device), Streams(device)
    health = Health(members, streams, Replays(device), Traffic())
    channel = HostChannel(members, health, None)
    store = channel._store = dist.HashStore()
    if is_late:
        with pytest.raises(interlace.PeerTimeoutError, match="waited 100 s for rank 1"):
            channel.exchange("label", 5)
        assert deadline_s <= now < 1.01 * deadline_s
    else:
        assert channel.exchange("label", 5) == [5, 7]
    assert health.broken == is_late


def _interrupted() -> tuple[float, bool] | None:
    """Interrupt rank 0 while it waits for rank 1 in an exchange, which comes much later."""
    process_group = dist.new_group([0, 1])
    group = group_of(process_group)
    interlace.set_deadline(DEADLINE_S, process_group)
    if dist.get_rank() == 1:
        dist.barrier()
        return None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(INTERRUPT_S, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.exchange("waiting", 0)
    seconds = time.monotonic() - begun
    dist.barrier()
    return seconds, group.broken


def test_an_interrupt_ends_a_wait_at_once(ranks: Any) -> None:
    (seconds, broken), _ = ranks(2).run(_interrupted)
    assert INTERRUPT_S <= seconds < SOON_S
    assert broken, "the peer would wait for an exchange that this rank has left"
