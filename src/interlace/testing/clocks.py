"""Vector clocks: the knowledge of every program about the operations of all programs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Clocks = npt.NDArray[np.int64]
"""By thread (a program of a rank, or the rank's host), the number of its known releases."""

# A clock that is never ahead: a rank knows everything about its own programs.
_ALWAYS = np.iinfo(np.int64).max


class Knowledge:
    """The clocks of all threads: a thread's own clock, and the clocks of others that it knows.

    *Released* knowledge has come by releases and waits. *Observed* knowledge has come by packed
    words, too: a word tells that stores are over, but not that loads are. Arrays are never changed,
    only replaced, so copies share them.

    Args:
        slices: By rank, the threads that are the rank's.
        threads: Number of threads.
    """

    def __init__(self, slices: list[slice], threads: int) -> None:
        nothing = np.zeros(threads, np.int64)
        self.nothing = nothing
        self.clock = [1] * threads
        self._slices = slices
        self._released = [nothing] * threads
        self._observed = [nothing] * threads
        # Computed on demand, because most operations of a thread add nothing to its knowledge.
        self._seen: list[tuple[Clocks, Clocks] | None] = [None] * threads

    def copy(self) -> Knowledge:
        """Return a copy, for another schedule."""
        new = object.__new__(Knowledge)
        new.__dict__.update(self.__dict__)
        new.clock, new._seen = list(self.clock), list(self._seen)
        new._released, new._observed = list(self._released), list(self._observed)
        return new

    def begin(self, thread: int, released: Clocks, observed: Clocks) -> None:
        """Let a thread begin with this knowledge."""
        self._released[thread], self._observed[thread] = released, observed
        self._seen[thread] = None

    def publish(self, thread: int) -> tuple[Clocks, Clocks]:
        """Return a thread's released and observed knowledge, and advance its clock.

        Later operations of the thread are not part of the returned knowledge.
        """
        released, observed = self._released[thread].copy(), self._observed[thread].copy()
        released[thread] = observed[thread] = self.clock[thread]
        self.clock[thread] += 1
        return released, observed

    def join(self, thread: int, released: Clocks | None, observed: Clocks) -> None:
        """Add to a thread's knowledge; None adds no released knowledge."""
        if released is not None:
            self._released[thread] = np.maximum(self._released[thread], released)
        self._observed[thread] = np.maximum(self._observed[thread], observed)
        self._seen[thread] = None

    def of(self, thread: int, rank: int) -> tuple[Clocks, Clocks]:
        """Return a thread's released knowledge, and that together with the observed knowledge.

        Both include everything about the thread's own rank, ``rank``.
        """
        knowledge = self._seen[thread]
        if knowledge is None:
            released = self._released[thread].copy()
            released[self._slices[rank]] = _ALWAYS
            knowledge = released, np.maximum(released, self._observed[thread])
            self._seen[thread] = knowledge
        return knowledge
