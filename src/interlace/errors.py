"""Every error that Interlace raises on purpose.

::

    InterlaceError
    ├── ArgumentError (ValueError)        an argument breaks a rule of the call
    │   └── ConfigError                   a configuration file, trace or model parameter breaks one
    ├── RankMismatchError                 ranks called the same operator with different arguments
    ├── GroupError                        this process group cannot be used
    ├── BackendError                      the machine, its driver or a package lacks something
    ├── WorkspaceError                    memory cannot be allocated now (as in a graph's capture)
    ├── PeerTimeoutError (TimeoutError)   a peer did not do its part before the deadline
    ├── MiscountError                     a kernel counted a wrong number of tiles
    └── LaunchError                       a rank started by ``interlace.launch`` failed

A message reads: *subject* must *rule*; got *value*. *What to do.*
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class InterlaceError(Exception):
    """Base of every error that Interlace raises on purpose.

    Errors can be pickled with their attributes, as processes that raise them for others do.
    """

    def __reduce__(self) -> tuple[object, ...]:
        # An exception's own way calls the constructor with the message alone.
        return _remade, (type(self), self.args), self.__dict__

    @property
    def line(self) -> str:
        """The message in one line."""
        return " ".join(str(self).split())


def _remade(kind: type[InterlaceError], args: tuple[object, ...]) -> InterlaceError:
    """Return an unpickled error, to which its attributes are added."""
    error = kind.__new__(kind)
    error.args = args
    return error


class ArgumentError(InterlaceError, ValueError):
    """An argument breaks a rule of the call. Nothing was sent and nothing was changed."""


class ConfigError(ArgumentError):
    """A configuration file, a trace or a parameter of a model breaks a rule.

    The message names the file and the key.
    """


class RankMismatchError(InterlaceError):
    """Ranks of one group called the same operator with arguments that do not fit together.

    Raised on every rank that took part in the comparison, before any kernel starts.
    """


class GroupError(InterlaceError):
    """The process group cannot be used.

    It is too large, not joined by this rank, or on several nodes where memory must be shared.
    """


class BackendError(InterlaceError):
    """The machine, its driver or an installed package lacks something that the call needs."""


class WorkspaceError(InterlaceError):
    """Symmetric memory cannot be allocated at this point."""


class LaunchError(InterlaceError):
    """A rank started by :func:`interlace.launch` failed; ``__cause__`` is its error, if known.

    Attributes:
        rank: Number of the first rank that failed.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    @property
    def line(self) -> str:
        """The message's first line, without the traceback of the rank."""
        return next((line for line in str(self).splitlines() if line.strip()), type(self).__name__)


class PeerTimeoutError(InterlaceError, TimeoutError):
    """A peer did not do its part before the group's deadline.

    The group is broken from then on: its epochs no longer agree, so every later call on it raises
    this error again instead of computing nonsense. Call :func:`interlace.recover` on every rank,
    or, if one is dead, destroy the process group and build a new one.

    If the process group's store is gone, ``lost_store`` is set. Then ``peer`` is the rank that had
    the store, which is an inference: that rank has died or ended, or is not reached. It is -1 if no
    rank of the group had the store.

    Attributes:
        operator: Name of the operator that waited.
        rank: The rank that waited.
        peer: The rank that it waited for; -1 if several may be late.
        through: The rank that its kernel waited for, which waited for ``peer`` itself; None if the
            kernel waited for ``peer``.
        slice: The slice that it waited for (see the operator's README); of slices over the network
            the first is 1.
        wanted: The epoch that it waited for (24 bits); 0 for a wait on the host.
        seen: The epoch that it saw instead; 0 for a wait on the host.
        different_call: True if the peer did come, but with other arguments.
        deadline_s: Time that it waited, in s.
        node: Number of the peer's node; None in a group of one node.
        lost_store: True if the process group's store was gone, which tells ranks who is late.
    """

    def __init__(
        self,
        *,
        operator: str,
        rank: int,
        peer: int,
        through: int | None = None,
        slice: int = 0,
        wanted: int = 0,
        seen: int = 0,
        different_call: bool = False,
        deadline_s: float,
        node: int | None = None,
        lost_store: bool = False,
    ) -> None:
        late = f"rank {peer}" if peer >= 0 else "a peer"
        late += "" if node is None else f" of node {node}"
        awaited = "in the exchange on the host"
        if wanted:
            awaited = f"slice {slice}, epoch {wanted}, and saw epoch {seen}"
            awaited = awaited if through is None else f"through rank {through}: {awaited}"
        elif slice:
            awaited = f"slice {slice}, over the network"
        # Epochs have 24 bits. A wait also takes the next three for the awaited one.
        is_ahead = through is None and seen > 0 and 3 < (seen - wanted) % 2**24 < 2**23
        reason = "is late, dead, or made a different call"
        if different_call:
            reason = "made a different call"
        elif peer == rank:
            reason = "is this rank itself, which must signal before it waits"
        elif wanted and is_ahead:
            reason = "is calls ahead, or set the signal again before this rank had seen it"
        message = (
            f"{operator}: rank {rank} waited {deadline_s:g} s for {late} ({awaited}). "
            f"The peer {reason}; this group is broken now. "
            f"Check that every rank makes the same calls in the same order, or raise the deadline "
            f"with interlace.set_deadline(seconds)."
        )
        if lost_store:
            owner = late if peer >= 0 else "a process outside of this group"
            message = (
                f"{operator}: rank {rank} must reach the process group's store, which {owner} has; "
                "it is gone. So that process has died or ended, or is not reached; this group is "
                "broken now. Look for the first error of that process, and start all ranks again."
            )
        super().__init__(message)
        self.operator = operator
        self.rank = rank
        self.peer = peer
        self.through = through
        self.slice = slice
        self.wanted = wanted
        self.seen = seen
        self.different_call = different_call
        self.deadline_s = deadline_s
        self.node = node
        self.lost_store = lost_store


class MiscountError(InterlaceError):
    """A kernel has counted fewer, or more, tiles than its triggered transfers expect.

    Copies may have begun before their piece was complete. The group is broken from then on, and
    peers raise :class:`PeerTimeoutError`, because this rank does not announce its output to them.

    Attributes:
        rank: The rank whose kernel has miscounted.
        piece: The first piece of the output with a wrong count.
        wanted: Number of tiles that the piece has.
        seen: Number of tiles that were counted.
    """

    def __init__(self, *, rank: int, piece: int, wanted: int, seen: int) -> None:
        super().__init__(
            f"triggered transfers: the kernel on rank {rank} must count every tile of a piece "
            f"once; got {seen} for the {wanted} of "
            f"piece {piece}. This group is broken now. Check the tiles that were given, and that "
            "the kernel counts its last one."
        )
        self.rank = rank
        self.piece = piece
        self.wanted = wanted
        self.seen = seen


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return a sentence, after a space, that names what a mistyped text may stand for; empty if
    nothing is like it.

    Args:
        text: What was given.
        known: What would have been right. A name of several words may be meant by one of them.
    """
    import difflib  # seldom needed, and `import interlace` must be quick

    names = {part.lower(): name for name in known for part in (*name.split(), name)}
    close: list[str] = difflib.get_close_matches(text.lower(), names, n=1)
    return f" Did you mean {names[close[0]]}?" if close else ""
