"""The event engine: integer nanoseconds, ties in the order of scheduling, first-come-first-served
servers.

Everything that the simulator models is built of three things: an :class:`Engine` that calls
functions at times, a :class:`Server` that does one thing at a time, and a :class:`Join` that calls
a function when several things are done.

Two runs of a model are equal, bit for bit: time is an integer, events of one instant are
called in the order in which they were scheduled, and nothing depends on hashes, on the clock or on
random numbers.

Example::

    engine = Engine()
    link = Server("link")
    engine.after(5, lambda: print(engine.now, link.reserve(engine.now, 10)))   # 5 5
    engine.after(7, lambda: print(engine.now, link.reserve(engine.now, 10)))   # 7 15
    engine.run()

The second call begins at 15, because the link is busy until then.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class Engine:
    """A clock and the events still to come.

    Attributes:
        now: The current time in nanoseconds.
        events: How many events were called.
    """

    __slots__ = ("_heap", "_sequence", "events", "now")

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, time_ns: int, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` at ``time_ns``, after all calls that were scheduled for that instant
        before.

        Raises:
            ValueError: the time has passed. A model that asks for it has a fault.
        """
        if time_ns < self.now:
            raise ValueError(
                f"an event must not lie in the past; got {time_ns} ns at {self.now} ns."
            )
        # The sequence number breaks ties, so that functions themselves are never compared.
        self._sequence += 1
        heapq.heappush(self._heap, (time_ns, self._sequence, call, args))

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` when ``delay_ns`` have passed."""
        self.at(self.now + delay_ns, call, *args)

    def run(self) -> int:
        """Call all events in order, with those that they schedule; return the last one's time."""
        # Local names: this loop is most of the time of a simulation.
        heap, pop, events = self._heap, heapq.heappop, 0
        try:
            while heap:
                self.now, _, call, args = pop(heap)
                events += 1
                call(*args)
        finally:
            self.events += events
        return self.now


class Server:
    """A resource that does one thing at a time, first come, first served: a link, a processor, a
    copy engine.

    Attributes:
        free_ns: Time at which all reserved work will be done.
        busy_ns: Nanoseconds of work in all.
    """

    __slots__ = ("busy_ns", "free_ns", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.free_ns = 0
        self.busy_ns = 0

    def reserve(self, now_ns: int, duration_ns: int) -> int:
        """Reserve ``duration_ns`` of work at ``now_ns``; return the time at which it begins."""
        start = self.free_ns if self.free_ns > now_ns else now_ns
        self.free_ns = start + duration_ns
        self.busy_ns += duration_ns
        return start


class Join:
    """A counter that calls ``complete()`` once ``count`` parts have called :meth:`done`.

    Without any parts it calls at once.
    """

    __slots__ = ("_complete", "left")

    def __init__(self, count: int, complete: Callable[[], None]) -> None:
        self.left = count
        self._complete = complete
        if count == 0:
            complete()

    def done(self) -> None:
        """Count one part as done."""
        self.left -= 1
        if self.left == 0:
            self._complete()


def duration_ns(count: float, per_second: float) -> int:
    """Return the nanoseconds, rounded up, for ``count`` bytes or FLOPs at a rate per second.

    Rounding up keeps results from undercutting their physical bound.
    """
    return math.ceil(count * 1e9 / per_second)
