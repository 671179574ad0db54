"""What adapters share: whether the user has chosen Interlace for a program that loads it as a
plug-in, and counts of the calls that an adapter took over.
"""

from __future__ import annotations

import collections
import logging
import os

from interlace import environment

log = logging.getLogger("interlace.integrations")

_NAME = "interlace"
"""The plug-in's name, by its entry points."""

_OFF = ("", "0", "false", "no", "off")


def is_on(variable: str) -> bool:
    """Return whether a variable of another program is on.

    Any value counts that is no word for off: a promise is kept rather than broken.
    """
    return os.environ.get(variable, "").strip().lower() not in _OFF


def is_chosen(program: str, variable: str, plugins: str) -> bool:
    """Return whether the user has chosen Interlace for a program that found it installed.

    One line in the log says so either way.

    Args:
        program: The program's name.
        variable: Interlace's variable for it; ``0`` counts for more than the program's list.
        plugins: The program's variable with the names of the plug-ins to load.

    Raises:
        ArgumentError: ``variable`` is neither on nor off.
    """
    names = {name.strip() for name in os.environ.get(plugins, "").split(",")}
    asked = environment.switch(variable)
    is_asked = _NAME in names if asked is None else asked
    if is_asked:
        log.info("Interlace is on in %s: %s=0 switches it off.", program, variable)
    else:
        log.info(
            "Interlace is installed, but off in %s: %s=1, or %s in %s, switches it on.",
            program, variable, _NAME, plugins,
        )  # fmt: skip
    return is_asked


class Calls:
    """Counts of calls by operator and reason.

    Attributes:
        taken: Calls of each operator that Interlace ran.
        left: Calls that the program's own operator ran, by operator and reason.

    Example:
        >>> symm_mem.calls.left
        Counter({('fused_matmul_reduce_scatter', 'it scatters the last dimension'): 2})
    """

    def __init__(self) -> None:
        self.taken: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[tuple[str, str]] = collections.Counter()

    def take(self, operator: str) -> None:
        """Count a call that Interlace runs."""
        self.taken[operator] += 1

    def leave(self, operator: str, reason: str) -> None:
        """Count a call that the program's own operator runs, and log the first for each reason."""
        if not self.left[operator, reason]:
            log.info("%s left alone: %s", operator, reason)
        self.left[operator, reason] += 1

    def clear(self) -> None:
        """Set all counts to zero."""
        self.taken.clear()
        self.left.clear()
