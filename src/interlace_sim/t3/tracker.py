"""The tracker, which counts the updates of each outstanding block of the output and reports the
last.

The low bits of a block's number choose one of ``sets`` sets of ``ways`` counters each. A block
whose set is full is counted in DRAM instead, where each of its updates reads and writes 64 bytes;
nothing stops and no count is lost, and the traffic is reported.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

COUNTER_BYTES = 64
"""Bytes that are read and written per update of a block that is counted in DRAM."""


class Tracker:
    """A set-associative table of counters of blocks that have some of their updates.

    Attributes:
        most_entries: Largest number of counters in use.
        overflows: Number of blocks that were counted in DRAM.
    """

    def __init__(self, sets: int, ways: int, spill: Callable[[Callable[[], None]], None]) -> None:
        """Prepare empty counters.

        Args:
            sets: Number of sets; 0 counts every block in DRAM.
            ways: Counters of a set.
            spill: Counts one update in DRAM, and calls its argument when that is done.
        """
        self._sets, self._ways, self._spill = sets, ways, spill
        self._used: collections.Counter[int] = collections.Counter()
        self._left: dict[int, int] = {}
        self._spilled: set[int] = set()
        self._entries = 0
        self.most_entries = 0
        self.overflows = 0

    def update(self, block: int, expected: int, complete: Callable[[], None]) -> None:
        """Count one of a block's ``expected`` updates, and call ``complete()`` after the last."""
        # A block's counter is taken at its first update, not before: outstanding blocks are few.
        if block not in self._left:
            self._begin(block, expected)
        if block in self._spilled:
            self._spill(lambda: self._count(block, complete))
        else:
            self._count(block, complete)

    def _begin(self, block: int, expected: int) -> None:
        self._left[block] = expected
        index = block % self._sets if self._sets else 0
        # A full set does not evict: a new block is counted in DRAM until it is complete.
        if not self._sets or self._used[index] >= self._ways:
            self._spilled.add(block)
            self.overflows += 1
            return
        self._used[index] += 1
        self._entries += 1
        self.most_entries = max(self.most_entries, self._entries)

    def _count(self, block: int, complete: Callable[[], None]) -> None:
        self._left[block] -= 1
        if self._left[block]:
            return
        del self._left[block]
        if block in self._spilled:
            self._spilled.remove(block)
        else:
            self._used[block % self._sets] -= 1
            self._entries -= 1
        complete()
