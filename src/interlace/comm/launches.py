"""How many kernels this process has launched: whether the number has changed says whether one may
be running.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Launches:
    """A number that only grows, but for launches that turn out not to have taken place."""

    value: int = 0


launches = Launches()
"""Incremented before every launch of :class:`interlace.comm.kernels.Launch`, and every replay of a
group's graphs.
"""
