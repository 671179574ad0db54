"""Rules that a schedule can break, those of the memory model above all, and their messages."""

from __future__ import annotations

from interlace.testing.operations import Kind, Operation, Words

_WAITS = {
    Kind.WAIT: "waits",
    Kind.WORDS: "waits for packed words",
    Kind.COLLECT: "waits in an exchange on the host",
}


class Violation(Exception):
    """A rule of the memory model is broken, a rank's program failed, or no rank can go on.

    Attributes:
        kind: As in :class:`interlace.testing.report.Failure`.
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


def early_store(rank: int, node: Operation, reader: int) -> Violation:
    """Return the violation of a store that does not come after a load that it overwrites."""
    return Violation(
        "race",
        f"rank {rank}, {node.site}, stores what rank {reader} may still load: nothing says that "
        "its load is over",
    )


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
