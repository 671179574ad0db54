"""Events that kernels have recorded, read from a device's memory."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from interlace.comm.replay.recording import RecordedLaunch
from interlace.comm.runtime import context
from interlace.tracing.libraries import Activity

NAMES = {
    context.BEGIN: "begin",
    context.TILE: "tile",
    context.COMPUTED: "computed",
    context.PUT: "put",
    context.SIGNAL: "signal",
    context.WAIT: "wait",
    context.ARRIVED: "arrived",
    context.UNPACKED: "unpacked",
    context.MARK: "mark",
}


class Event(NamedTuple):
    """One event of one program.

    Attributes:
        time_ns: Time on the clock of rank 0.
        kind: One of :data:`NAMES`.
        number: What the kind says: a tile, a slice, bytes, any number, or the place of a signal in
            symmetric memory in words of 4 bytes.
        peer: The rank at the other end; -1 where there is none, or several.
        has_several: Whether the other end is several ranks.
        sm: Number of the SM; 0 on the CPU backend.
        lane: The thread that recorded it: 0, or the place of a peer in a tile of them.
    """

    time_ns: float
    kind: str
    number: int
    peer: int
    has_several: bool
    sm: int
    lane: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel on one rank.

    Attributes:
        name: Name of the kernel.
        programs: Program -> its events, in the order in which each thread recorded them.
        lost: Number of events that were overwritten by later ones.
    """

    name: str
    programs: dict[int, list[Event]]
    lost: int


class Packed(NamedTuple):
    """One rank's events for the other ranks, as JSON values.

    Attributes:
        launches: The values of :func:`pack`.
        base: Address of symmetric memory in the rank's process, from which signals' addresses are
            counted: so one signal has one number on all ranks.
        offset_ns: What the rank's clock is ahead of rank 0's.
        others: The activities of libraries and copy engines, as lists of their fields.
    """

    launches: list[dict[str, Any]]
    base: int
    offset_ns: float
    others: list[list[Any]]


def pack(launches: Sequence[RecordedLaunch]) -> list[dict[str, Any]]:
    """Read the rings of a rank's launches into JSON values; waits for the device."""
    return [_packed(launch.name, launch.rings.cpu().numpy()) for launch in launches]


def _packed(name: str, rings: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return a launch's events as a compressed table: program, lane, time, what happened."""
    counts = rings[:, :, 0, 0] & 0xFFFFFFFF
    rows: list[np.ndarray[Any, Any]] = []
    for program, lane in np.argwhere(counts):
        count = int(counts[program, lane])
        kept = min(count, context.RING_EVENTS)
        indices = 1 + (np.arange(count - kept, count) & (context.RING_EVENTS - 1))
        table = np.empty((kept, 4), np.int64)
        table[:, 0], table[:, 1] = program, lane
        table[:, 2:] = rings[program, lane, indices]
        rows.append(table)
    table = np.concatenate(rows) if rows else np.empty((0, 4), np.int64)
    lost = int(np.maximum(counts - context.RING_EVENTS, 0).sum())
    text = base64.b85encode(zlib.compress(table.tobytes())).decode()
    return {"name": name, "lost": lost, "events": text}


def timer_step_ns(packed: Sequence[dict[str, Any]]) -> int:
    """Return the greatest step of which all times of one rank are multiples, apart from an offset.

    It is the resolution of the device's timer, if there are enough events; 0 if there are none.
    """
    times = [table[:, 2] for table in (_table(launch["events"]) for launch in packed)]
    together = np.concatenate(times) if times else np.empty(0, np.int64)
    return int(np.gcd.reduce(together - together.min())) if len(together) else 0


def unpack(of_ranks: Sequence[Packed]) -> tuple[list[list[Launch]], list[list[Activity]]]:
    """Return the launches and the other activities of each rank.

    Times count from the first event or activity of all ranks: a library's product may come before
    every kernel that records.

    Args:
        of_ranks: What each rank has packed, in rank order.
    """
    tables = [[_table(launch["events"]) for launch in rank.launches] for rank in of_ranks]
    # Clocks count nanoseconds from 1970 on: as integers, since floats have no room for the digits.
    for rank, of_rank in zip(of_ranks, tables, strict=True):
        for table in of_rank:
            table[:, 2] -= round(rank.offset_ns)
    activities = [
        [
            activity._replace(start_ns=activity.start_ns - round(rank.offset_ns))
            for activity in (Activity(*fields) for fields in rank.others)
        ]
        for rank in of_ranks
    ]
    times = [int(table[:, 2].min()) for of_rank in tables for table in of_rank if len(table)]
    times += [int(activity.start_ns) for of_rank in activities for activity in of_rank]
    start_ns = min(times, default=0)
    launches = [
        [
            Launch(launch["name"], _programs(table, start_ns, rank.base), launch["lost"])
            for launch, table in zip(rank.launches, of_rank, strict=True)
        ]
        for rank, of_rank in zip(of_ranks, tables, strict=True)
    ]
    others = [
        [activity._replace(start_ns=activity.start_ns - start_ns) for activity in of_rank]
        for of_rank in activities
    ]
    return launches, others


def first_times(launches: Sequence[RecordedLaunch]) -> list[tuple[str, int]]:
    """Return the name and the first time (ns, the device's clock) of each launch that began."""
    times = []
    for launch in launches:
        rings = launch.rings.cpu().numpy()
        begun = rings[:, 0, 0, 0] & 0xFFFFFFFF
        # The first event is that of the beginning, unless later ones have overwritten it.
        if begun.any() and begun.max() <= context.RING_EVENTS:
            times.append((launch.name, int(rings[begun > 0, 0, 1, 0].min())))
    return times


def _table(text: str) -> np.ndarray[Any, Any]:
    """Return a launch's table from its compressed text."""
    data = zlib.decompress(base64.b85decode(text))
    return np.frombuffer(data, np.int64).reshape(-1, 4).copy()


def _programs(table: np.ndarray[Any, Any], start_ns: int, base: int) -> dict[int, list[Event]]:
    """Return the events of each program."""
    programs: dict[int, list[Event]] = {}
    first_word = base // 4
    for program, lane, time_ns, what in table.tolist():
        peer = what >> 8 & 0xFF
        kind, number = NAMES[what & 0xFF], what >> 32
        if kind in ("signal", "arrived"):
            number = (number - first_word) & 0xFFFFFFFF
        event = Event(
            time_ns=float(time_ns - start_ns),
            kind=kind,
            number=number,
            peer=-1 if peer in (context.SEVERAL, context.NOBODY) else peer,
            has_several=peer == context.SEVERAL,
            sm=what >> 16 & 0xFFFF,
            lane=lane,
        )
        programs.setdefault(program, []).append(event)
    return programs
