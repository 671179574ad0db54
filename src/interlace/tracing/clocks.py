"""Clocks of the ranks' devices, compared by kernels that ask each other for the time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from interlace.comm import Group
from interlace.comm.kernels import Launch

_NAME = "tracing"
_ROUNDS = 64
_SIGNALS = 2  # of a pair of ranks


class Clock(NamedTuple):
    """The clock of one rank's device.

    Attributes:
        offset_ns: What it is ahead of rank 0's.
        error_ns: By how much the offset may be wrong: half of the shortest round trip.
    """

    offset_ns: float
    error_ns: float


def compare(group: Group) -> list[Clock]:
    """Return the clock of each rank. Collective; nothing of the group may run meanwhile.

    On the CPU backend all ranks have the clock of the machine.
    """
    same = Clock(0.0, 0.0)
    if group.backend == "cpu":
        return [same] * group.world_size
    return [same, *(compare_with_first(group, rank) for rank in range(1, group.world_size))]


def compare_with_first(group: Group, client: int) -> Clock:
    """Compare the clock of one rank with that of rank 0, by an exchange of signals. Collective."""
    from interlace.tracing.clock_kernel import compare_clocks  # imports Triton

    memory = group.workspace(_NAME, 1, _SIGNALS)
    memory.reset(group.rank)
    group.synchronize()
    # No signal may be set before its reader has reset its memory.
    group.exchange("comparing clocks", client)
    times = torch.zeros(2, _ROUNDS, dtype=torch.int64, device=group.device)
    if group.rank in (0, client):
        arguments = {
            "signals": memory.signals.address,
            "times": times,
            "ctx": group.context(_NAME),
            "rounds": _ROUNDS,
            "client": client,
            "server": 0,
        }
        with group.running():
            Launch(compare_clocks, (1,), arguments, {"num_warps": 1})()
    group.synchronize()
    of_ranks = group.exchange("comparing clocks", times.tolist())
    (asked, answered), (told, _) = of_ranks[client], of_ranks[0]
    return nearest(asked, answered, told)


def nearest(asked: list[int], answered: list[int], told: list[int]) -> Clock:
    """Return a client's clock by the round whose answer came back soonest.

    Args:
        asked: The client's time before each round, in ns.
        answered: The client's time after it.
        told: The server's time in between.
    """
    trip_ns, ahead_ns = min(
        (after - before, (after + before - 2 * between) / 2)
        for before, after, between in zip(asked, answered, told, strict=True)
    )
    return Clock(ahead_ns, trip_ns / 2)
