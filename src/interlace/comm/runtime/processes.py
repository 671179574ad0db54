"""Tell whether the process of another rank of this machine has ended.

A number of a process is used again once its parent has heard of its end, and means another process
in another container. So a process is known by the time of its start as well, and one that this
process cannot see is not known at all. Until its parent has heard, an ended process is a zombie.

Source: proc_pid_stat(5); elsewhere than on Linux no process is known.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_STATE, _START = 0, 19  # places among the fields behind the name
_ENDED = ("Z", "X")


class Process(NamedTuple):
    """Identify a process of a machine.

    Attributes:
        number: Its number (PID).
        start: Time of its start, in ticks of the machine's clock.
    """

    number: int
    start: int


def own_process() -> Process | None:
    """Return this process; None where the system does not tell."""
    fields = _fields(os.getpid())
    return None if fields is None else Process(os.getpid(), int(fields[_START]))


def lives(process: Process) -> bool:
    """Return whether a process of this machine is there and has not ended."""
    fields = _fields(process.number)
    return (
        fields is not None and int(fields[_START]) == process.start and fields[_STATE] not in _ENDED
    )


def _fields(number: int) -> list[str] | None:
    """Return what the system says of a process, behind its number and its name."""
    try:
        text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name may have blanks and parentheses.
    return text[text.rindex(")") + 1 :].split()


__all__ = ["Process", "lives", "own_process"]
