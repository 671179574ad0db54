"""How long ranks wait: a group's deadline, all waits that follow from it, and the pauses of a wait.

A group has one deadline. Every wait of its kernels and every exchange on its host lasts so long at
most. A rank that has waited in vain then finds out who was late, for which the others must still
answer; that takes seconds more. Waits for libraries, which know nothing of the deadline, have
limits of their own.
"""

from __future__ import annotations

import datetime
import itertools
import numbers
import os
from collections.abc import Iterator

from interlace.errors import ArgumentError

_DEFAULT_S, _BELOW_S = 30.0, 1e6

NEVER = datetime.timedelta(days=365)  # for torch's backends, whose own time-outs end the process
ANSWER_S = 1.0  # in which a rank that waits as well answers a question in the store
NAMING_S = 5.0  # beyond a deadline, in which rank 0 names the absent rank, on a busy machine
EXPLANATION_S = 12.0  # in which it is known, or never, who was late
INTERRUPT_S = 0.5  # that Ctrl-C may have to wait for the store
LEAST_CONNECT_S = 60.0  # in which NCCL has connected, at least: many ranks take some seconds
ABORT_S = 10.0  # in which NCCL has ended a communicator, unless a graph has its kernels
FAILED_S = 5.0  # in which kernels that wait have ended, once a call has failed
KERNELS_ABORT_S = 0.2  # in which an abort has reached NCCL's kernels


def default_deadline_s(ranks_per_gpu: int = 1) -> float:
    """Return a group's first deadline in seconds: ``INTERLACE_DEADLINE_S``, or 30 s.

    Kernels of ranks that share a GPU run by time slices, so 30 s are added per rank of a GPU.

    Raises:
        ArgumentError: ``INTERLACE_DEADLINE_S`` is not a number above 0 and below a million.
    """
    text = os.environ.get("INTERLACE_DEADLINE_S", "")
    if not text:
        return _DEFAULT_S * ranks_per_gpu
    try:
        seconds = float(text)
    except ValueError:
        raise ArgumentError(
            f"INTERLACE_DEADLINE_S must be a number of seconds; got {text!r}."
        ) from None
    return checked_deadline_s(seconds, "INTERLACE_DEADLINE_S")


def checked_deadline_s(seconds: float, subject: str = "a deadline") -> float:
    """Return a deadline in seconds.

    Raises:
        ArgumentError: It is not a number above 0 and below a million; ``subject`` names it.
    """
    if not isinstance(seconds, numbers.Real) or not 0 < seconds < _BELOW_S:
        raise ArgumentError(
            f"{subject} must be above 0 and below a million seconds; got {seconds!r}."
        )
    return float(seconds)


def recovery_s(deadline_s: float) -> float:
    """Return the seconds for which ``recover`` waits for the other ranks: one that has not noticed
    the failure does so one deadline later.
    """
    return 3 * deadline_s


def giving_up_s(deadline_s: float) -> float:
    """Return the seconds in which ranks that wait as well give up, too, and say so."""
    return max(2.0, min(deadline_s / 4, 5.0))


def accusation_s(deadline_s: float) -> float:
    """Return the seconds in which a rank that was accused says whom it has waited for itself: its
    own wait may have begun later.
    """
    return max(ANSWER_S, deadline_s / 4)


def watch_pause_s(deadline_s: float) -> float:
    """Return the seconds between two looks at whether a GPU's slices are late."""
    return min(0.25, deadline_s / 20)


# A look keeps a core busy for up to a millisecond, and other ranks need the core to compute.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 5e-4, 2e-2, 1.5
_GROWING_LOOKS = 10  # from here on a pause is a longest one


def pause_s(looks: int) -> float:
    """Return the seconds between two looks at what another thread or process is to write: up to a
    third of what the wait has lasted so far.

    Args:
        looks: Number of pauses that the wait has made before this one.
    """
    return min(_SHORTEST_PAUSE_S * _GROWTH ** min(looks, _GROWING_LOOKS), _LONGEST_PAUSE_S)


def pauses_of_a_wait() -> Iterator[float]:
    """Return the lengths of the pauses of one wait in seconds, without an end."""
    return map(pause_s, itertools.count())
