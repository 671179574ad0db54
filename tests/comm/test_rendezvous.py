"""Ranks that meet in a store, whatever lies there from before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from interlace import PeerTimeoutError
from interlace.comm.host.rendezvous import meet


def _all_meet(
    store: dist.Store, ranks: list[int], world_size: int, timeout_s: float
) -> list[object]:
    def one(rank: int) -> object:
        try:
            return meet(store, "joining a group", rank, world_size, timeout_s)
        except PeerTimeoutError as error:
            return error.rank, error.peer, error.operator

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_meeting_has_a_name_of_its_own(world_size: int) -> None:
    store = dist.HashStore()
    names = [_all_meet(store, [*range(world_size)], world_size, 30.0) for _ in range(3)]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 3


@pytest.mark.parametrize(("missing", "named"), [(0, 0), (1, 1), (3, 3)])
def test_everybody_names_the_rank_that_is_missing(missing: int, named: int) -> None:
    here = [rank for rank in range(4) if rank != missing]
    found = _all_meet(dist.HashStore(), here, 4, 0.5)
    assert found == [(rank, named, "joining a group") for rank in here]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_what_an_attempt_that_failed_has_left_is_nobodys(missing: int) -> None:
    store = dist.HashStore()
    _all_meet(store, [rank for rank in range(3) if rank != missing], 3, 0.3)
    names = _all_meet(store, [0, 1, 2], 3, 30.0)
    assert len(set(names)) == 1
    assert isinstance(names[0], str)
