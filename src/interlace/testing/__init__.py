"""Tests of protocols: :func:`explore` tries many interleavings of several ranks' kernels, in one process."""

from interlace.testing.explorer import Failure, Report, explore
from interlace.testing.ranks import Rank

__all__ = ["Failure", "Rank", "Report", "explore"]
