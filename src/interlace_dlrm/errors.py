"""The error that files of click logs and of checkpoints raise."""

from __future__ import annotations

from interlace.errors import InterlaceError


class DataError(InterlaceError, ValueError):
    """A file's contents break its format.

    The message names the file, and the line of a text file.
    """
