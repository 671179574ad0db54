"""The error that a failing schedule raises."""

from __future__ import annotations

from interlace.errors import InterlaceError


class ProtocolError(InterlaceError):
    """A program fails in a schedule that :func:`interlace_explorer.explore` has tried.

    Attributes:
        kind: ``"wrong result"``, ``"deadlock"``, ``"race"``, ``"two writers"`` or ``"error"``.
        schedule: The schedule, for ``explore(..., replay=schedule)``.
    """

    def __init__(self, kind: str, message: str, schedule: str) -> None:
        super().__init__(
            f"explore: every schedule of a program must be right; got a {kind}: {message}. "
            f"Run explore(program, replay={schedule!r}) to see it again."
        )
        self.kind = kind
        self.schedule = schedule
