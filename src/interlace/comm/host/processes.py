"""Tell which ranks' processes of this machine have ended, and which rank's process has the process
group's store: with that process, the store goes.

A number of a process is used again once its parent has heard of its end, and means another process
in another container. So a process is known by the time of its start as well, and one that this
process cannot see is not known at all. Until its parent has heard, an ended process is a zombie.

Source: proc_pid_stat(5); elsewhere than on Linux no process is known.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

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
    return process_of(os.getpid())


def process_of(number: int) -> Process | None:
    """Return the process that has a number now; None where the system does not tell."""
    fields = _fields(number)
    return None if fields is None else Process(number, int(fields[_START]))


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


def expected_owner(process_group: dist.ProcessGroup) -> int:
    """Return the rank that has the store by the rule of torch's rendezvous; -1 if none has.

    Rank 0 of the default group has the TCP store of ``tcp://`` and ``env://``, unless an agent of
    torchrun says that it has. A store in a file belongs to no process.
    """
    if _tcp_store(process_group.get_group_store()) is None:
        return -1
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return -1
    ranks = dist.get_process_group_ranks(process_group)
    return ranks.index(0) if 0 in ranks else -1


def is_served_here(store: dist.Store) -> bool:
    """Return whether this process listens on the port of a TCP store."""
    tcp_store = _tcp_store(store)
    if tcp_store is None:
        return False
    return any(_listens(int(name), tcp_store.port) for name in os.listdir("/proc/self/fd"))


def _tcp_store(store: dist.Store) -> dist.TCPStore | None:
    """Return the TCP store below all prefixes, or None if the store is of another kind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def _listens(descriptor: int, port: int) -> bool:
    """Return whether a descriptor of this process is a socket that listens on ``port``."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return (
                copy.family in (socket.AF_INET, socket.AF_INET6)
                and bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                and copy.getsockname()[1] == port
            )
    except OSError:  # closed meanwhile, by another thread
        return False
