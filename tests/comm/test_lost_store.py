"""Ranks die, rank 0 above all, which has the process group's store: every use of the store by the
others ends with an error that names the dead rank.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.comm.host.common_profile import published
from interlace.comm.host.members import Exchange, Members
from interlace.comm.host.processes import expected_owner, is_served_here
from tests.errors import error_of
from tests.faults.scenarios import MortalPool

_DEADLINE_S = 1.0


def _new_group(ranks: list[int] | None = None, **variables: str) -> Any:
    """A process group that has been joined, with a short deadline."""
    process_group = dist.new_group(ranks)
    if process_group != dist.GroupMember.NON_GROUP_MEMBER:
        with mock.patch.dict(os.environ, variables):
            group_of(process_group)
        interlace.set_deadline(_DEADLINE_S, process_group)
    return process_group


def _seen(call: Any, *args: Any, **kwargs: Any) -> tuple[str, int, bool]:
    kind, _, fields = error_of(call, *args, **kwargs)
    return kind, fields["peer"], fields["lost_store"]


def _after_the_death_of(victim: int) -> dict[str, Any] | None:
    """What each use of the store shows; then, what rank 1 sees when rank 0 has just left."""
    x, w = torch.ones(12, 8), torch.ones(8, 8)
    owners = [group_of().members.store_rank, expected_owner(dist.group.WORLD)]
    with mock.patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE="True"):
        owners.append(expected_owner(dist.group.WORLD))
    owners.append(is_served_here(dist.group.WORLD.get_group_store()))
    called, recovered, left = _new_group(), _new_group(), _new_group()
    joined, outside = dist.new_group(), _new_group([1, 2])
    nodes = _new_group(INTERLACE_NODES="3")
    between = {"group": nodes, "impl": "chunked"}
    interlace.set_deadline(90.0, nodes)
    interlace.gemm_reduce_scatter(x, w, **between)
    interlace.set_deadline(_DEADLINE_S, nodes)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_the_end_of(pids[victim])
    found: dict[str, Any] = {"owners": owners}
    found["a call"] = _seen(interlace.gemm_all_reduce, x, w, group=called, impl="fused")
    found["the next call"] = _seen(interlace.gemm_all_reduce, x, w, group=called, impl="fused")
    found["who does not wait"] = group_of(called).channel.first_not_waiting()
    found["recover"] = _seen(interlace.recover, recovered, _DEADLINE_S)
    with mock.patch.dict(os.environ, INTERLACE_DEADLINE_S=str(_DEADLINE_S)):
        found["joining"] = _seen(interlace.group_of, joined)
    found["between nodes"] = _seen(interlace.gemm_reduce_scatter, x, w, **between)
    if victim == 0:
        call = {"group": outside, "impl": "fused"}
        found["outside"] = _seen(interlace.gemm_all_reduce, torch.ones(4, 8), w, **call)
    else:
        found["left"] = _seen(group_of(left).exchange, "test", None)
        if dist.get_rank() == 0:
            os._exit(0)  # as a program does that ends by its error, and takes the store along
    return found


def _where_profiles_are_shared(victim: int) -> tuple[str, int, bool]:
    """What a rank sees when one dies while those that join a group agree on a machine profile."""
    process_group = dist.new_group()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def share(members: Members, exchange: Exchange) -> None:
        if members.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        _wait_for_the_end_of(pids[victim])
        assert published("a machine") is None

    with (
        mock.patch.object(interlace.comm.groups.group, "share_profile", share),
        mock.patch.dict(os.environ, INTERLACE_DEADLINE_S=str(_DEADLINE_S)),
    ):
        return _seen(interlace.group_of, process_group)


def _wait_for_the_end_of(pid: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("the victim must die")


def _outcomes(call: Any, victim: int) -> list[Any]:
    """What the ranks return of whom one dies, which returns nothing; rank 0 has the store."""
    pool = MortalPool(3, store="rank 0")
    try:
        outcomes: list[Any] = pool.run(call, victim)
    finally:
        pool.close()
    assert outcomes[victim] is None
    return outcomes


@pytest.mark.parametrize("victim", [0, 2])
def test_every_use_of_the_store_names_the_dead_rank(victim: int) -> None:
    outcomes = _outcomes(_after_the_death_of, victim)
    living = [outcome for outcome in outcomes if outcome is not None]
    assert len(living) == (2 if victim == 0 else 1)
    for rank, found in enumerate(outcomes):
        if found is None:
            continue
        assert found.pop("owners") == [0, 0, -1, rank == 0]
        assert found.pop("who does not wait") == victim
        if victim == 0:
            # Nobody of that group has died, and its members know that the store is elsewhere.
            assert found.pop("outside") == ("PeerTimeoutError", -1, True)
        assert set(found.values()) == {("PeerTimeoutError", victim, victim == 0)}, found


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_while_profiles_are_shared_is_named(victim: int) -> None:
    outcomes = _outcomes(_where_profiles_are_shared, victim)
    living = [outcome for outcome in outcomes if outcome is not None]
    assert living == [("PeerTimeoutError", victim, victim == 0)] * 2
