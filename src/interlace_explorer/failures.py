"""Rules that a schedule can break, above all of the memory model, and reports of exploring."""

from __future__ import annotations

import dataclasses

from interlace_explorer.errors import ProtocolError
from interlace_explorer.operations import Kind, Operation, Words

_WAITS = {
    Kind.WAIT: "waits",
    Kind.WORDS: "waits for packed words",
    Kind.COLLECT: "waits in an exchange on the host",
}


DATA_RACES = ("race", "two writers")
"""Kinds of failures that are accesses to the same memory in no order."""


class Violation(Exception):
    """A rule of the memory model is broken, a rank's program failed, or no rank can go on.

    Attributes:
        kind: As in :class:`Failure`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def early_load(rank: int, node: Operation, writer: str) -> Violation:
    """Return the violation of a load that does not come after the store that it sees."""
    return Violation(
        "race",
        f"rank {rank}, {node.site}, loads what may still be written: it does not come after the "
        f"store by {writer}",
    )


def unordered_stores(rank: int, node: Operation, writer: str) -> Violation:
    """Return the violation of two ranks' stores to the same memory in no order."""
    return Violation(
        "two writers",
        f"rank {rank}, {node.site}, stores where another rank has stored before, and nothing "
        f"orders the two: {writer}",
    )


def early_store(rank: int, node: Operation, reader: str) -> Violation:
    """Return the violation of a store that does not come after a load that it overwrites."""
    return Violation(
        "race",
        f"rank {rank}, {node.site}, stores what {reader} may still load: nothing says that its "
        "load is over",
    )


def wrong_result_of_a_race(race: Violation, wrong: Violation) -> Violation:
    """Return a race whose schedule has a wrong result as well, which is said after its cause."""
    return Violation(race.kind, f"{race}; the same schedule has a wrong result {wrong}")


def describe_wait(rank: int, node: Operation, seen: Words | None) -> str:
    """Describe in one line the point at which a rank stands.

    Args:
        rank: The rank.
        node: Its next operation.
        seen: int32 signals that a wait would see; None if it waits for something else.
    """
    if node.kind == Kind.END:
        return f"rank {rank} has ended"
    signals = ""
    if seen is not None and node.values is not None:
        signals = f" for {_epochs(node.values)}, and sees {_epochs(seen)}"
    return f"rank {rank} {_WAITS.get(node.kind, 'stands')}{signals}, {node.site}"


def _epochs(words: Words) -> str:
    """Format epochs and the marks of their calls, in the order of the signals."""
    parts = [
        f"{int(word) & 0xFFFFFF}"
        + (f" of call {int(word) >> 24 & 0xFF}" if int(word) >> 24 else "")
        for word in words
    ]
    return "[" + ", ".join(parts) + "]"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A mistake of a program, which one schedule shows.

    Attributes:
        kind: ``"wrong result"``, if no race was found in the same schedule; ``"deadlock"``;
            ``"race"``: a load of memory that may still be written, or a store to memory that may
            still be loaded; ``"two writers"``: two ranks store to the same memory in no order;
            ``"error"``: the program raised an exception.
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
