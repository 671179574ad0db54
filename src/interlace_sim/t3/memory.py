"""DRAM with a controller of two streams, the product's and the communication's.

Addresses are interleaved over the channels, so that all channels see equal traffic: one channel is
simulated, column access by column access, and stands for all. The model is an FR-FCFS controller
like GPGPU-Sim's:

- a request waits in its stream until the arbiter lets it enter the channel's queue, a number of
  column accesses;
- from the queue, the access that can start first goes next: hits of open rows before the oldest
  access, and accesses in the bus's direction before the others;
- **banks**: a row must be opened before it is read or written; opening another costs the time to
  close and to open, and the row cycle. Accesses that run through memory find the next columns in
  the same row, those of a tile another row after each run;
- **bank groups**: two accesses of one group are further apart than the bus needs, and near-memory
  updates twice as far again;
- **turnarounds** between reading and writing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from interlace_sim.engine import Engine
from interlace_sim.t3 import machine as machines

Kind = Literal["read", "write", "update"]
Stream = Literal["compute", "communication"]
SEGMENT_BYTES = 256
"""Bytes of one channel before addresses go on to the next, and the most that a simulated access
stands for.
"""
QUEUE_STEP_NS = 4096
"""Nanoseconds of a step in the record of the queue's entries."""
_SPREAD = 2654435761
"""Knuth's multiplicative hash, which scatters the runs of a tile over the banks."""
_CAUSES = 64
"""An upper limit of pairs of cause and kind, which keeps the rows of different pairs apart."""


@dataclasses.dataclass(slots=True)
class _Request:
    """The part of a request that is still to be done on the channel.

    Attributes:
        label: Cause and kind in records.
        left: Bytes that have not entered the queue.
        segment: The most bytes of one access.
        scattered: Whether every access is in another row, instead of running through memory.
        pending: Accesses that are in the queue or on the bus.
    """

    cause: str
    kind: Kind
    label: str
    left: float
    segment: float
    scattered: bool
    arrived_ns: int
    done: Callable[[], None]
    pending: int = 0


@dataclasses.dataclass(slots=True)
class _Access:
    """An access of up to a segment in one row of one bank."""

    request: _Request
    read: bool
    number: int
    size: float
    columns: float
    row: int
    arrived_ns: float


class Memory:
    """DRAM and its controller.

    Attributes:
        bytes: Bytes that were moved, by (cause, kind).
        busy_ns: Nanoseconds that the bus worked.
        threshold: Entries below which communication may enter while the product comes first; None
            lets the streams enter in turn.
        most_entries: Largest number of entries in the channel's queue.
        waited_ns: Longest wait of a communication request for the queue.
        row_misses: Accesses of the simulated channel that opened a row.
        accesses: Accesses of the simulated channel.
        queued_ns: Time in the channel's queue of all entries that left it, in each step of
            :data:`QUEUE_STEP_NS`, by the step's number.
    """

    def __init__(
        self,
        engine: Engine,
        machine: machines.T3Machine,
        observe: Callable[[str, int, int, float], None] | None,
    ) -> None:
        memory = machine.memory
        self._engine, self._observe = engine, observe
        self._channels = memory.channels.value
        self._column_bytes = memory.column_bytes.value
        # The simulated channel stands for all, so its share of the bandwidth sets its clock.
        self._column_ns = 1e9 * self._column_bytes * self._channels / memory.bytes_per_s.value
        group = memory.group_column_ns.value
        self._group_ns = {"read": group, "write": group, "update": memory.update_column_ns.value}
        self._open_ns, self._row_cycle_ns = memory.row_open_ns.value, memory.row_cycle_ns.value
        self._row_gap_ns = memory.row_gap_ns.value
        self._to_write_ns, self._to_read_ns = (
            memory.read_to_write_ns.value,
            memory.write_to_read_ns.value,
        )
        self._write_recovery_ns = memory.write_recovery_ns.value
        self._row_bytes = memory.row_bytes.value
        self._capacity, self._latency_ns = (
            memory.queue_entries.value,
            round(memory.latency_ns.value),
        )
        self._starvation_ns = machine.arbitration.starvation_ns.value
        self._streams: dict[Stream, collections.deque[_Request]] = {
            "compute": collections.deque(),
            "communication": collections.deque(),
        }
        banks, groups = int(memory.banks.value), int(memory.bank_groups.value)
        self._group_of = [bank % groups for bank in range(banks)]
        self._queues: list[list[_Access]] = [[] for _ in range(banks)]
        self._open_row = [-1] * banks
        self._opened = [-1e9] * banks
        # The earliest time at which a bank may open another row.
        self._closed = [0.0] * banks
        self._last_open = -1e9
        self._group_free = [0.0] * groups
        self._bus_free = 0.0
        self._reading = True
        self._batch = 0.0
        self._entries = 0.0
        self._serving = False
        self._numbers = 0
        self._runs = 0
        self._after_communication = True
        self._cursors: dict[tuple[str, Kind], tuple[int, float]] = {}
        self.threshold: float | None = None
        self.bytes: dict[tuple[str, Kind], float] = {}
        self.busy_ns = 0.0
        self.most_entries = 0.0
        self.waited_ns = 0
        self.row_misses = 0
        self.accesses = 0
        self.queued_ns: dict[int, float] = {}

    def request(
        self,
        stream: Stream,
        cause: str,
        kind: Kind,
        size: float,
        done: Callable[[], None],
        run: float = 0,
    ) -> None:
        """Move ``size`` bytes, and call ``done()`` when the last of them is there.

        Without any bytes ``done()`` is called at once.

        Args:
            stream: Stream of the request.
            cause: Cause in records.
            kind: ``"read"``, ``"write"`` or ``"update"``.
            size: Bytes over all channels.
            done: Function without arguments.
            run: Contiguous bytes, as of a tile's row; 0 if the request runs through memory.
        """
        self.bytes[cause, kind] = self.bytes.get((cause, kind), 0.0) + size
        if size <= 0:
            done()
            return
        # An access that is larger than the queue would never enter it.
        most = min(SEGMENT_BYTES, self._capacity * self._column_bytes)
        label, segment = f"{cause} {kind}", min(run or most, most)
        left, now = size / self._channels, self._engine.now
        self._streams[stream].append(
            _Request(cause, kind, label, left, segment, bool(run), now, done)
        )
        self._arbitrate()

    def mean_entries(self) -> float:
        """Return the mean number of entries in the channel's queue over the run."""
        return sum(self.queued_ns.values()) / max(1, self._engine.now)

    def _arbitrate(self) -> None:
        """Let accesses enter the queue as long as it has room."""
        while (stream := self._next()) is not None:
            request = self._streams[stream][0]
            size = request.left if request.left < request.segment else request.segment
            columns = size / self._column_bytes
            if self._entries + columns > self._capacity:
                break
            self._after_communication = stream == "communication"
            if self._after_communication:
                self.waited_ns = max(self.waited_ns, self._engine.now - request.arrived_ns)
            request.left -= size
            request.pending += 1
            # Bytes per channel are fractions, so a remainder may be a rounding error.
            if request.left < 1e-6:
                request.left = 0.0
                self._streams[stream].popleft()
            self._entries += columns
            if self._entries > self.most_entries:
                self.most_entries = self._entries
            bank, row = self._scattered() if request.scattered else self._running(request, size)
            self._numbers += 1
            read, now = request.kind == "read", self._engine.now
            self._queues[bank].append(
                _Access(request, read, self._numbers, size, columns, row, now)
            )
        if not self._serving and self._entries > 1e-9:
            self._serve()

    def _scattered(self) -> tuple[int, int]:
        """Return a bank without a pattern, and a row that no other access uses."""
        self._runs += 1
        return ((self._runs * _SPREAD & 0xFFFFFFFF) >> 8) % len(self._queues), -2 - self._runs

    def _running(self, request: _Request, size: float) -> tuple[int, int]:
        """Return bank and row of an access that runs through memory.

        It goes segment by segment through the rows of two banks, then of the next two; each cause
        and kind begins at other banks.
        """
        key = (request.cause, request.kind)
        number, at = self._cursors.get(key, (len(self._cursors), 0.0))
        self._cursors[key] = number, at + size
        pair, banks = int(at / (2 * self._row_bytes)), len(self._queues)
        bank = (2 * (pair + 3 * number) + int(at / SEGMENT_BYTES) % 2) % banks
        return bank, pair * _CAUSES + number

    def _next(self) -> Stream | None:
        """Return the stream whose turn it is; None if none may enter."""
        compute, communication = self._streams["compute"], self._streams["communication"]
        if not communication:
            return "compute" if compute else None
        # Without a threshold the streams take turns, access by access.
        if self.threshold is None:
            return "compute" if compute and self._after_communication else "communication"
        # A communication request that has waited for too long goes first, so that none starves.
        if self._engine.now - communication[0].arrived_ns > self._starvation_ns:
            return "communication"
        if compute:
            return "compute"
        return "communication" if self._entries < self.threshold else None

    def _serve(self) -> None:
        """Put the access that can start first on the bus.

        After a queue's length of columns in one direction, an access of the other direction goes
        first, so that neither starves.
        """
        bank, index, start, opened = self._first()
        access = self._queues[bank].pop(index)
        request, kind, columns = access.request, access.request.kind, access.columns
        if opened is not None:
            self.row_misses += 1
            self._open_row[bank], self._opened[bank] = access.row, opened
            self._last_open = max(self._last_open, opened)
        read = access.read
        self._batch = columns if read != self._reading else self._batch + columns
        self._reading, self._serving = read, True
        self._bus_free = start + columns * self._column_ns
        group_free = start + columns * self._group_ns[kind]
        self._group_free[self._group_of[bank]] = group_free
        # A written row must not be closed before the write has reached the cells.
        free = group_free if read else group_free + self._write_recovery_ns
        self._closed[bank] = max(free, self._opened[bank] + self._row_cycle_ns)
        self.accesses += 1
        self.busy_ns += columns * self._column_ns
        if self._observe is not None:
            end = round(self._bus_free)
            self._observe(request.label, round(start), end, access.size * self._channels)
        self._engine.at(max(self._engine.now, math.ceil(self._bus_free)), self._served, access)

    def _first(self) -> tuple[int, int, float, float | None]:
        """Find the access that can start first.

        Each bank offers the oldest access to its open row, or else its oldest one. Of two that can
        start at the same time, the older one goes first.

        Returns:
            The access's bank, its index in the bank's queue, its start, and the time at which its
            row is opened; None if the row is open.
        """
        # Events are at integer nanoseconds and the bus is not: an access that directly follows
        # another one starts at the exact time at which that one ended.
        now = self._bus_free if self._engine.now - self._bus_free < 1 else float(self._engine.now)
        # Hits in one direction could otherwise keep the bus for ever.
        tired = self._batch >= self._capacity
        # Local names, and comparisons instead of max(): this loop is most of the time of a run.
        reading, open_rows, group_of = self._reading, self._open_row, self._group_of
        group_free, closed, open_ns = self._group_free, self._closed, self._open_ns
        next_open = self._last_open + self._row_gap_ns
        # The bus needs time to turn around between reading and writing.
        turned = self._bus_free + (self._to_write_ns if reading else self._to_read_ns)
        best = (True, math.inf, 0)
        found: tuple[int, int, float, float | None] = (0, 0, 0.0, None)
        for bank, queue in enumerate(self._queues):
            if not queue:
                continue
            open_row, opened, index = open_rows[bank], None, 0
            start = group_free[group_of[bank]]
            if start < now:
                start = now
            # First-ready: an access to the open row overtakes older ones of its bank.
            for access in queue:
                if access.row == open_row:
                    break
                index += 1
            else:
                access, index = queue[0], 0
                opened = closed[bank]
                if opened < next_open:
                    opened = next_open
                if opened < access.arrived_ns:
                    opened = access.arrived_ns
                if start < opened + open_ns:
                    start = opened + open_ns
            same = access.read == reading
            if not same and start < turned:
                start = turned
            offer = (tired and same, start, access.number)
            if offer < best:
                best, found = offer, (bank, index, start, opened)
        return found

    def _served(self, access: _Access) -> None:
        self._serving = False
        self._entries -= access.columns
        now = self._engine.now
        step = now // QUEUE_STEP_NS
        waited_ns = access.columns * (now - access.arrived_ns)
        self.queued_ns[step] = self.queued_ns.get(step, 0.0) + waited_ns
        request = access.request
        request.pending -= 1
        if request.pending == 0 and request.left == 0:
            # The data of a read travel back to the compute units; a write is done once it is
            # served.
            if request.kind == "read":
                self._engine.after(self._latency_ns, request.done)
            else:
                request.done()
        self._arbitrate()
