"""Counts of the calls that an adapter took over, and of those that it left to the program."""

from __future__ import annotations

import collections
import logging

log = logging.getLogger("interlace.integrations")


class Calls:
    """Counts of calls by operator and reason.

    Attributes:
        taken: Calls of each operator that Interlace ran.
        left: Calls that the program's own operator ran, by operator and reason.

    Example:
        >>> symm_mem.calls.left
        Counter({('fused_matmul_reduce_scatter', 'it scatters the last dimension'): 2})
    """

    def __init__(self) -> None:
        self.taken: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[tuple[str, str]] = collections.Counter()

    def take(self, operator: str) -> None:
        """Count a call that Interlace runs."""
        self.taken[operator] += 1

    def leave(self, operator: str, reason: str) -> None:
        """Count a call that the program's own operator runs, and log the first for each reason."""
        if not self.left[operator, reason]:
            log.info("%s left alone: %s", operator, reason)
        self.left[operator, reason] += 1

    def clear(self) -> None:
        """Set all counts to zero."""
        self.taken.clear()
        self.left.clear()
