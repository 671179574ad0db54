"""Ranks whose process has ended are known, and are named before those that wait for them."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from interlace.comm.groups.group import group_of
from interlace.comm.host import processes
from interlace.comm.host.processes import Process, lives, own_process
from interlace.comm.runtime import context as ctx
from tests.errors import error_of
from tests.faults.scenarios import MortalPool


def test_a_process_lives_until_its_end_is_known_or_not() -> None:
    own = own_process()
    assert own is not None
    assert own.number == os.getpid()
    assert lives(own)
    assert not lives(Process(own.number, own.start + 1)), "another process has this number now"
    child = os.fork()
    if not child:
        signal.pause()
    started = Process(child, int(processes._fields(child)[processes._START]))
    assert lives(started)
    os.kill(child, signal.SIGKILL)
    end = time.monotonic() + 60
    while lives(started):  # a zombie, as nobody has asked for its outcome
        assert time.monotonic() < end
        time.sleep(0.01)
    os.waitpid(child, 0)
    assert not lives(started)


def test_the_name_of_a_process_may_look_like_more_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "7 (a) Z (b) S " + " ".join(map(str, range(4, 52)))
    monkeypatch.setattr(
        processes, "Path", lambda name: SimpleNamespace(read_text=lambda **how: text)
    )
    assert processes._fields(7)[:2] == ["S", "4"]
    assert lives(Process(7, 22))
    assert not lives(Process(7, 23))


def _after_the_end_of_ranks() -> Any:
    """Rank 3 dies while rank 2 waits for it, which gives up and leaves; then rank 0's kernel has
    waited for rank 1, which still computes, and has the store.
    """
    group = group_of()
    rank, health = dist.get_rank(), group.health
    group.deadline_s = 8.0
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        group.channel.first_late(3)
        os._exit(0)
    for victim in (2, 3):
        while lives(group.members.processes[victim]):
            time.sleep(0.01)
    if rank == 1:
        time.sleep(4)
        return group.channel.first_not_waiting()
    context = group.context("gemm_reduce_scatter")
    fields = health._record_view
    fields[ctx.RECORD_OPERATOR] = context[ctx.OPERATOR]
    fields[ctx.RECORD_PEER], fields[ctx.RECORD_WANTED] = 1, 7
    fields[ctx.RECORD_CODE] = ctx.LATE
    start = time.monotonic()
    kind, _, error = error_of(group.check)
    return kind, error["peer"], time.monotonic() - start


def test_the_rank_that_has_ended_is_named_at_once() -> None:
    """Neither the one that the kernel waited for, nor the one that left because of it."""
    pool = MortalPool(4, store="file")
    try:
        (kind, peer, seconds), seen_by_rank_1, *_ = pool.run(_after_the_end_of_ranks)
    finally:
        pool.close()
    assert (kind, peer, seen_by_rank_1) == ("PeerTimeoutError", 3, 3)
    assert seconds < 2.0, "no answer of rank 1 is waited for"


def _exchange_without_two() -> Any:
    """Rank 2 dies, and rank 1 comes to an exchange only when rank 0 has given it up."""
    group = group_of()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while lives(group.members.processes[2]):
        time.sleep(0.01)
    if dist.get_rank() == 1:
        time.sleep(4)
    kind, _, error = error_of(group.channel.exchange, "test", None, deadline_s=2.0)
    return kind, error["peer"]


def test_an_exchange_names_the_rank_that_has_ended_before_one_that_is_late() -> None:
    pool = MortalPool(3, store="file")
    try:
        outcomes = pool.run(_exchange_without_two)
    finally:
        pool.close()
    assert outcomes == [("PeerTimeoutError", 2), ("PeerTimeoutError", 2), None]
