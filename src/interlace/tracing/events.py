"""Events that kernels have recorded, read from a device's memory."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from interlace.comm import context
from interlace.comm.recording import RecordedLaunch

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
        places = 1 + (np.arange(count - kept, count) & (context.RING_EVENTS - 1))
        table = np.empty((kept, 4), np.int64)
        table[:, 0], table[:, 1] = program, lane
        table[:, 2:] = rings[program, lane, places]
        rows.append(table)
    table = np.concatenate(rows) if rows else np.empty((0, 4), np.int64)
    lost = int(np.maximum(counts - context.RING_EVENTS, 0).sum())
    text = base64.b85encode(zlib.compress(table.tobytes())).decode()
    return {"name": name, "lost": lost, "events": text}


def unpack(packed: dict[str, Any], offset_ns: float, base: int) -> Launch:
    """Return a launch from its JSON values.

    Args:
        packed: One of the values of :func:`pack`.
        offset_ns: What the rank's clock is ahead of rank 0's, and ahead of the trace's beginning.
        base: Address of symmetric memory in the rank's process, from which signals' addresses are
            counted: so one signal has one number on all ranks.
    """
    first_word = base // 4
    data = zlib.decompress(base64.b85decode(packed["events"]))
    programs: dict[int, list[Event]] = {}
    for program, lane, time_ns, what in np.frombuffer(data, np.int64).reshape(-1, 4).tolist():
        peer = what >> 8 & 0xFF
        kind, number = NAMES[what & 0xFF], what >> 32
        if kind in ("signal", "arrived"):
            number = (number - first_word) & 0xFFFFFFFF
        event = Event(
            time_ns=time_ns - offset_ns,
            kind=kind,
            number=number,
            peer=-1 if peer in (context.SEVERAL, context.NOBODY) else peer,
            has_several=peer == context.SEVERAL,
            sm=what >> 16 & 0xFFFF,
            lane=lane,
        )
        programs.setdefault(program, []).append(event)
    return Launch(packed["name"], programs, packed["lost"])


def first_time_ns(launches: Sequence[Sequence[Launch]]) -> float:
    """Return the time of the first event of all ranks' launches; 0 if there is none."""
    times = (
        event.time_ns
        for of_rank in launches
        for launch in of_rank
        for events in launch.programs.values()
        for event in events
    )
    return min(times, default=0.0)
