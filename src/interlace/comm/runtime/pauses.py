"""Pauses between two looks at what another thread or process is to write."""

import itertools
from collections.abc import Iterator

# A look keeps a core busy for up to a millisecond, and other ranks need the core to compute.
_SHORTEST_S, _LONGEST_S, _GROWTH = 5e-4, 2e-2, 1.5
_GROWING_LOOKS = 10  # from here on a pause is a longest one


def pause_s(looks: int) -> float:
    """Return the length of a pause in seconds: up to a third of what its wait has lasted so far.

    Args:
        looks: Number of pauses that the wait has made before this one.
    """
    return min(_SHORTEST_S * _GROWTH ** min(looks, _GROWING_LOOKS), _LONGEST_S)


def pauses_of_a_wait() -> Iterator[float]:
    """Return the lengths of the pauses of one wait in seconds, without an end."""
    return map(pause_s, itertools.count())
