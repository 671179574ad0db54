"""The error that a simulated result below its physical lower bound raises."""

from __future__ import annotations

from interlace.errors import InterlaceError


class UnphysicalError(InterlaceError):
    """A simulated result lies under its physical lower bound.

    The model is wrong, or the mode that the simulation was asked for.
    """
