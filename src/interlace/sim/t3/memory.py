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

from interlace.sim.engine import Engine
from interlace.sim.t3 import machine as machines

Kind = Literal["read", "write", "update"]
Stream = Literal["compute", "communication"]
SEGMENT_BYTES = 256
"""Bytes of one channel before addresses go on to the next, and the most that a simulated access
stands for.
"""
_SPREAD = 2654435761
"""Knuth's multiplicative hash, which scatters the runs of a tile over the banks."""
_CAUSES = 64
"""An upper limit of pairs of cause and kind, which keeps the rows of different pairs apart."""


@dataclasses.dataclass(slots=True)
class _Request:
    """The part of a request that is still to be done on the channel.

    Attributes:
        left: bytes that have not entered the queue.
        run: bytes in one row, or 0 if rows are used completely.
        pending: accesses that are in the queue or on the bus.
    """

    cause: str
    kind: Kind
    left: float
    run: float
    arrived_ns: int
    done: Callable[[], None]
    pending: int = 0


@dataclasses.dataclass(slots=True)
class _Access:
    """An access of up to a segment in one row of one bank."""

    request: _Request
    number: int
    size: float
    columns: float
    row: int
    arrived_ns: float


_Candidate = tuple[bool, float, int, int, int, float | None]
"""An access that may be next: whether it should wait for the other direction, its start, number and
bank, its index in the bank's queue, and the time at which its row is opened.
"""


class Memory:
    """DRAM and its controller.

    Attributes:
        bytes: bytes that were moved, by (cause, kind).
        busy_ns: nanoseconds that the bus worked.
        threshold: entries below which communication may enter while the product comes first; None
            lets the streams enter in turn.
        most_entries: largest number of entries in the channel's queue.
        waited_ns: longest wait of a communication request for the queue.
        row_misses: accesses of the simulated channel that opened a row.
        accesses: accesses of the simulated channel.
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
        self._groups = groups
        self._queues: list[list[_Access]] = [[] for _ in range(banks)]
        self._open_row = [-1] * banks
        self._bank_free = [0.0] * banks
        self._opened = [-1e9] * banks
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
        self._waiting_ns = 0.0

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
            stream: stream of the request.
            cause: cause in records.
            kind: ``"read"``, ``"write"`` or ``"update"``.
            size: bytes over all channels.
            done: function without arguments.
            run: contiguous bytes, as of a tile's row; 0 if the request runs through memory.
        """
        self.bytes[cause, kind] = self.bytes.get((cause, kind), 0.0) + size
        if size <= 0:
            done()
            return
        self._streams[stream].append(
            _Request(cause, kind, size / self._channels, run, self._engine.now, done)
        )
        self._arbitrate()

    def mean_entries(self) -> float:
        """Return the mean number of entries in the channel's queue over the run."""
        return self._waiting_ns / max(1, self._engine.now)

    def _arbitrate(self) -> None:
        """Let accesses enter the queue as long as it has room."""
        while (stream := self._next()) is not None:
            request = self._streams[stream][0]
            size = min(request.left, request.run or SEGMENT_BYTES, SEGMENT_BYTES)
            columns = size / self._column_bytes
            if self._entries + columns > self._capacity:
                break
            if stream == "communication":
                self.waited_ns = max(self.waited_ns, self._engine.now - request.arrived_ns)
            self._after_communication = stream == "communication"
            request.left -= size
            request.pending += 1
            # Bytes per channel are fractions, so a remainder may be a rounding error.
            if request.left < 1e-6:
                request.left = 0.0
                self._streams[stream].popleft()
            self._entries += columns
            self.most_entries = max(self.most_entries, self._entries)
            self._enter(request, size, columns)
        if not self._serving and self._entries > 1e-9:
            self._serve()

    def _enter(self, request: _Request, size: float, columns: float) -> None:
        bank, row = self._scattered() if request.run else self._running(request, size)
        self._numbers += 1
        self._queues[bank].append(
            _Access(request, self._numbers, size, columns, row, self._engine.now)
        )

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
        # Events are at integer nanoseconds and the bus is not: an access that directly follows
        # another one starts at the exact time at which that one ended.
        now = self._bus_free if self._engine.now - self._bus_free < 1 else float(self._engine.now)
        # Hits in one direction could otherwise keep the bus for ever.
        tired = self._batch >= self._capacity
        best = min(
            self._candidate(bank, queue, now, tired=tired)
            for bank, queue in enumerate(self._queues)
            if queue
        )
        _, start, _, bank, index, opened = best
        access = self._queues[bank].pop(index)
        request, kind = access.request, access.request.kind
        if opened is not None:
            self.row_misses += 1
            self._open_row[bank], self._opened[bank] = access.row, opened
            self._last_open = max(self._last_open, opened)
        read = kind == "read"
        self._batch = access.columns if read != self._reading else self._batch + access.columns
        self._reading, self._serving = read, True
        self._bus_free = start + access.columns * self._column_ns
        group_free = start + access.columns * self._group_ns[kind]
        self._group_free[bank % self._groups] = group_free
        # A written row must not be closed before the write has reached the cells.
        self._bank_free[bank] = group_free if read else group_free + self._write_recovery_ns
        self.accesses += 1
        self.busy_ns += access.columns * self._column_ns
        if self._observe is not None:
            self._observe(
                f"{request.cause} {kind}",
                round(start),
                round(self._bus_free),
                access.size * self._channels,
            )
        self._engine.at(max(self._engine.now, math.ceil(self._bus_free)), self._served, access)

    def _candidate(self, bank: int, queue: list[_Access], now: float, *, tired: bool) -> _Candidate:
        """Return a bank's next access: its open row's oldest, or else its oldest; and its start."""
        open_row, opened, index = self._open_row[bank], None, 0
        start = max(now, self._group_free[bank % self._groups])
        # First-ready: an access to the open row overtakes older ones of its bank.
        for at, access in enumerate(queue):
            if access.row == open_row:
                index = at
                break
        else:
            access = queue[0]
            opened = max(
                access.arrived_ns,
                self._bank_free[bank],
                self._opened[bank] + self._row_cycle_ns,
                self._last_open + self._row_gap_ns,
            )
            start = max(start, opened + self._open_ns)
        # The bus needs time to turn around between reading and writing.
        read = access.request.kind == "read"
        if read != self._reading:
            start = max(start, self._bus_free + (self._to_read_ns if read else self._to_write_ns))
        return tired and read == self._reading, start, access.number, bank, index, opened

    def _served(self, access: _Access) -> None:
        self._serving = False
        self._entries -= access.columns
        self._waiting_ns += access.columns * (self._engine.now - access.arrived_ns)
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
