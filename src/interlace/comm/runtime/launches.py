"""Count the kernels that this process has launched.

If the count has changed since a call began, a kernel of the call may be running.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Launches:
    """Count launches.

    It grows only, except that launches are subtracted again if they did not take place.

    Attributes:
        value: Number of launches.
    """

    value: int = 0


launches = Launches()
"""Count of this process: incremented before every launch of
:class:`interlace.comm.launching.kernels.Launch` and before every replay of a group's graphs.
"""
