"""Groups of one process group, and process groups of one name, that must not read each other's keys
in the store.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import interlace
from interlace.comm.groups.group import Group, solo_group


def _numbered_cpu() -> list[bool]:
    process_group = dist.new_group()
    group = interlace.group_of(process_group, "cpu")
    same = [
        interlace.group_of(process_group, name) is group
        for name in ("cpu:0", torch.device("cpu", 0))
    ]
    solo = solo_group(torch.device("cpu")) is solo_group(torch.device("cpu", 0))
    return [*same, solo]


def test_a_cpu_with_a_number_is_the_cpu(ranks):
    assert ranks(2).run(_numbered_cpu) == [[True] * 3] * 2


def _two_groups() -> list[list[int]]:
    """Of one process group, as two GPUs of one process have them; exchanges of both in turn."""
    process_group = dist.new_group()
    groups = [Group(process_group, torch.device("cpu")) for _ in range(2)]
    return [
        groups[which].exchange("a question", 100 * turn + 10 * which + groups[0].rank)
        for turn, which in enumerate((0, 0, 0, 1, 1, 0, 1))
    ]


def test_groups_of_one_process_group_have_keys_of_their_own(ranks):
    expected = [
        [100 * turn + 10 * which + rank for rank in range(2)]
        for turn, which in enumerate((0, 0, 0, 1, 1, 0, 1))
    ]
    assert ranks(2).run(_two_groups) == [expected] * 2


def _same_name_again() -> list[list[list[int]]]:
    """A process group whose name and store were another one's before, which ended in the middle of
    its exchanges.
    """
    store = dist.PrefixStore("a job", dist.group.WORLD.get_group_store())
    return [_with_store(store, start) for start in (0, 1000)]


class _Named:
    """What :class:`Group` asks of a process group."""

    def __init__(self, store: dist.Store) -> None:
        self.group_name, self._store = "again", store

    def get_group_store(self) -> dist.Store:
        return self._store


def _with_store(store: dist.Store, start: int) -> list[list[int]]:
    process_group = _Named(store)
    ranks = {"get_rank": dist.get_rank, "get_world_size": dist.get_world_size}
    dist.get_rank, dist.get_world_size = (
        (lambda _: ranks["get_rank"]()),
        (lambda _: ranks["get_world_size"]()),
    )
    try:
        group = Group(process_group, torch.device("cpu"))  # type: ignore[arg-type]
    finally:
        dist.get_rank, dist.get_world_size = ranks["get_rank"], ranks["get_world_size"]
    return [group.exchange("a question", start + turn + group.rank) for turn in range(3)]


def test_a_name_that_is_used_again_has_no_old_keys(ranks):
    expected = [[[start + turn, start + turn + 1] for turn in range(3)] for start in (0, 1000)]
    assert ranks(2).run(_same_name_again) == [expected] * 2
