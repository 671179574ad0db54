"""The explorer of interleavings: tries many schedules of several ranks' kernels in one process.

It needs no GPU and no second process; ``docs/explorer.md`` shows how to use it::

    from interlace_explorer import explore

    explore(program, ranks=2, schedules=1000).raise_if_failed()
"""

from interlace_explorer.errors import ProtocolError
from interlace_explorer.explorer import explore
from interlace_explorer.failures import Failure, Report
from interlace_explorer.ranks import Rank

__all__ = ["Failure", "ProtocolError", "Rank", "Report", "explore"]
