"""Results of exploring: a report, and the failure of a schedule."""

from __future__ import annotations

import dataclasses

from interlace.errors import ProtocolError


@dataclasses.dataclass(frozen=True)
class Failure:
    """A mistake of a program, which one schedule shows.

    Attributes:
        kind: ``"wrong result"``; ``"deadlock"``; ``"race"``: a load of memory that may still be
            written, or a store to memory that may still be loaded; ``"two writers"``: two ranks
            store to the same memory in no order; ``"error"``: the program raised an exception.
        message: The rank, the program and the line; for a deadlock, the wait of every rank.
        schedule: The shortest failing schedule that was found, for ``explore(..., replay=...)``.
        switches: Number of times that the schedule goes on with another rank.
    """

    kind: str
    message: str
    schedule: str
    switches: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} (schedule {self.schedule})"


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of exploring a program.

    Attributes:
        schedules: Number of distinct schedules that were tried.
        exhausted: True if these were all schedules with at most the given number of preemptions.
        runs: Number of times that a rank's program really ran; other schedules were followed in
            simulated memory alone.
        seconds: Time that exploring took, in s.
        failure: The first failure, in the shortest schedule found for it; None if every schedule
            was right.
    """

    schedules: int
    exhausted: bool
    runs: int
    seconds: float
    failure: Failure | None

    def raise_if_failed(self) -> None:
        """Raise an error if a schedule failed.

        Raises:
            ProtocolError: a schedule failed.
        """
        if self.failure is not None:
            raise ProtocolError(self.failure.kind, self.failure.message, self.failure.schedule)
