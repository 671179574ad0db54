"""Clocks of the ranks' devices: compared by kernels that ask each other for the time, and waited
for until all ranks begin at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from interlace.comm import Group
from interlace.comm.groups.symmetric_memory import Workspace
from interlace.comm.launching.kernels import Launch
from interlace.units import NS_PER_S

_NAME = "tracing"
_ROUNDS = 64

_UNREAD = 1 << 18
"""Elements of 4 bytes that every rank writes to every peer before a trace: 1 MiB uses all links."""

_BLOCK = 1024


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


def begin_together(group: Group, hold_s: float) -> None:
    """Enqueue a kernel that ends on all ranks at once, ``hold_s`` seconds later. Collective.

    What is enqueued behind it until then begins on all ranks at once, however late their hosts are,
    and finds all links between them awake.
    """
    from interlace.tracing.kernels import hold  # imports Triton

    memory = _reset_memory(group, "beginning a trace")
    arguments = {
        "signals": memory.signals.address,
        "unread": memory.data.address,
        "ctx": group.context(_NAME),
        "duration": int(hold_s * NS_PER_S),
    }
    constants = {
        "UNREAD": _UNREAD, "WORLD_SIZE": group.world_size, "BLOCK": _BLOCK, "num_warps": 4,
    }  # fmt: skip
    with group.running():
        Launch(hold, (1,), arguments, constants)()


def _reset_memory(group: Group, step: str) -> Workspace:
    """Return memory with ``_UNREAD`` elements and two signals per rank, all 0. Collective."""
    memory = group.workspace(_NAME, 4 * _UNREAD, 2 * group.world_size)
    memory.reset(group.rank)
    group.synchronize()
    # No signal may be set before its reader has reset its memory.
    group.exchange(step, "reset")
    return memory


def compare_with_first(group: Group, client: int) -> Clock:
    """Compare the clock of one rank with that of rank 0, by an exchange of signals. Collective."""
    from interlace.tracing.kernels import compare_clocks  # imports Triton

    signals = _reset_memory(group, "comparing clocks").signals.address
    times = torch.zeros(2, _ROUNDS, dtype=torch.int64, device=group.device)
    if group.rank in (0, client):
        arguments = {
            "signals": signals,
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
