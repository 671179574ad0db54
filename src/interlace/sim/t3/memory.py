"""DRAM behind a controller with two streams: the product's and the communication's.

Addresses are interleaved finely over the channels, so all channels are alike: one queue and one bus stand for all, with
requests of up to :data:`BURST_BYTES` over all of them. A request waits in its stream until the arbiter lets it enter the DRAM
queue; from there requests are served oldest first, those of the direction (read or write) that the bus is in before others,
as an FR-FCFS scheduler does, up to a queue's length of them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from interlace.sim.engine import Engine, Join
from interlace.sim.t3 import machine as machines

Kind = Literal["read", "write", "update"]
Stream = Literal["compute", "communication"]
BURST_BYTES = 16384
"""8 column accesses of 64 bytes on each of 32 channels."""


@dataclasses.dataclass(slots=True)
class Request:
    """Up to :data:`BURST_BYTES` of one kind."""

    cause: str
    kind: Kind
    size: float
    entries: float
    arrived_ns: int
    done: Callable[[], None]


class Memory:
    """DRAM and its controller.

    Attributes:
        bytes: moved, by (cause, kind).
        busy_ns: of the bus, turnarounds included.
        threshold: entries below which communication may enter while the product comes first; None is in the order of arrival.
        most_entries: that were in the DRAM queue of a channel at once.
        waited_ns: longest wait of a communication request for the DRAM queue.
    """

    def __init__(self, engine: Engine, machine: machines.T3Machine, observe: Callable[[str, int, int, float], None] | None) -> None:
        memory = machine.memory
        self._engine, self._observe = engine, observe
        self._ns_per_byte = 1e9 / (memory.bytes_per_s.value * memory.efficiency.value)
        self._ns_of = {"read": 1.0, "write": 1.0, "update": memory.update_cost.value}
        self._entry_bytes = memory.entry_bytes.value * memory.channels.value
        self._capacity = memory.queue_entries.value
        self._turnaround_ns, self._latency_ns = memory.turnaround_ns.value, round(memory.latency_ns.value)
        self._starvation_ns = machine.arbitration.starvation_ns.value
        self._streams: dict[Stream, collections.deque[Request]] = {
            "compute": collections.deque(),
            "communication": collections.deque(),
        }
        self._queue: list[Request] = []
        self._entries = 0.0
        self._serving = False
        self._reading = True
        self._batch = 0
        self._free_ns = 0.0
        self.threshold: float | None = None
        self.bytes: dict[tuple[str, Kind], float] = {}
        self.busy_ns = 0.0
        self.most_entries = 0.0
        self.waited_ns = 0

    def request(self, stream: Stream, cause: str, kind: Kind, size: float, done: Callable[[], None]) -> None:
        """Move ``size`` bytes; ``done()`` when the last of them is there. Nothing to move is done at once."""
        self.bytes[cause, kind] = self.bytes.get((cause, kind), 0.0) + size
        bursts = max(1, -(-int(size) // BURST_BYTES)) if size > 0 else 0
        join = Join(bursts, done)
        each = size / bursts if bursts else 0.0
        for _ in range(bursts):
            entries = min(self._capacity, each / self._entry_bytes)
            self._streams[stream].append(Request(cause, kind, each, entries, self._engine.now, join.done))
        self._arbitrate()

    def _arbitrate(self) -> None:
        """Let requests enter the DRAM queue as long as it has room."""
        while (stream := self._next()) is not None:
            request = self._streams[stream][0]
            if self._entries + request.entries > self._capacity:
                break
            self._streams[stream].popleft()
            if stream == "communication":
                self.waited_ns = max(self.waited_ns, self._engine.now - request.arrived_ns)
            self._entries += request.entries
            self.most_entries = max(self.most_entries, self._entries)
            self._queue.append(request)
        if not self._serving and self._queue:
            self._serve()

    def _next(self) -> Stream | None:
        """The stream whose turn it is."""
        compute, communication = self._streams["compute"], self._streams["communication"]
        if not communication:
            return "compute" if compute else None
        if self.threshold is None:
            first = compute and compute[0].arrived_ns <= communication[0].arrived_ns
            return "compute" if first else "communication"
        if self._engine.now - communication[0].arrived_ns > self._starvation_ns:
            return "communication"
        if compute:
            return "compute"
        return "communication" if self._entries < self.threshold else None

    def _serve(self) -> None:
        """Put the next request on the bus."""
        full = self._batch * BURST_BYTES >= self._capacity * self._entry_bytes
        wanted = not self._reading if full else self._reading
        at = next((at for at, request in enumerate(self._queue) if (request.kind == "read") == wanted), 0)
        request = self._queue.pop(at)
        turned = (request.kind == "read") != self._reading
        self._batch = 1 if turned or full else self._batch + 1
        self._reading, self._serving = request.kind == "read", True
        # Events are whole nanoseconds, the bus is not: a request that follows another starts where that ended.
        start = self._free_ns if self._engine.now - self._free_ns < 1 else float(self._engine.now)
        time_ns = request.size * self._ns_per_byte * self._ns_of[request.kind] + (self._turnaround_ns if turned else 0.0)
        self._free_ns = start + time_ns
        self.busy_ns += time_ns
        if self._observe is not None:
            self._observe(f"{request.cause} {request.kind}", round(start), round(self._free_ns), request.size)
        self._engine.at(max(self._engine.now, math.ceil(self._free_ns)), self._served, request)

    def _served(self, request: Request) -> None:
        self._serving = False
        self._entries -= request.entries
        if request.kind == "read":
            self._engine.after(self._latency_ns, request.done)
        else:
            request.done()
        self._arbitrate()
