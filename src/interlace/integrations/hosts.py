"""What adapters share: whether the user has chosen Interlace for a program that loads it as a
plug-in, and where the lines for the program's users go.
"""

from __future__ import annotations

import logging
import multiprocessing
import os

from interlace.clients import Client
from interlace.counting import log
from interlace.environment import LIMIT_VARIABLE


def is_chosen(client: Client) -> bool:
    """Return whether the user has chosen Interlace for a program that found it installed.

    One line in the log of the program's first process says so either way.

    Raises:
        ArgumentError: The client's variable is neither on nor off.
    """
    is_asked = client.is_asked()
    # A program loads plug-ins in each of its processes, before these have ranks.
    if multiprocessing.parent_process() is not None:
        return is_asked
    if is_asked:
        log.info("Interlace is on in %s: %s=0 switches it off.", client.title, client.variable)
    else:
        log.info(
            "Interlace is installed, but off in %s: %s=1, or %s in %s, switches it on.",
            client.title, client.variable, client.plugin, client.plugins,
        )  # fmt: skip
    return is_asked


def limit_memory(client: Client) -> None:
    """Set the client's limit of symmetric memory, unless the user has set one, or none by an empty
    variable.

    An engine gives nearly all memory away before most calls are made.
    """
    os.environ.setdefault(LIMIT_VARIABLE, client.limit)


def log_through(name: str) -> None:
    """Let Interlace's log go where the log of another name goes, if nobody has said where it goes.

    A program that configures its own logger alone would not show any line of Interlace's.
    """
    ours, theirs = logging.getLogger("interlace"), logging.getLogger(name)
    if ours.hasHandlers() or not theirs.hasHandlers():
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
