"""Tools that check operators and protocols, also those of other packages.

:func:`explore` tries many interleavings of several ranks' kernels in one process;
``docs/explorer.md`` shows how to use it. :mod:`interlace.testing.cases` has calls of every operator
with known results, and :mod:`interlace.testing.soak` makes such calls at random; see
``docs/reliability.md``.
"""

from interlace.testing.explorer import explore
from interlace.testing.failures import Failure, Report
from interlace.testing.ranks import Rank

__all__ = ["Failure", "Rank", "Report", "explore"]
