"""Show other programs of the user what this process holds of symmetric memory.

The record is an anonymous file, which ``/proc`` shows by its name. It goes with the process, so
nothing is left behind, and only the user and root can open it.

Source: memfd_create(2), proc_pid_fd(5).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from interlace.comm.host.processes import process_of
from interlace.units import format_memory

_NAME = "interlace-memory"
_MOST_BYTES = 1 << 20
_TRIES = 3
"""Times that a record is read which is being written meanwhile."""


class HeldMemory(NamedTuple):
    """Say what a rank holds of symmetric memory.

    Attributes:
        rank: The rank in the group.
        world_size: The group's ranks.
        device: The device of the memory, as text.
        nbytes: Bytes by name, as ``Group.workspace_bytes`` has them.
    """

    rank: int
    world_size: int
    device: str
    nbytes: Mapping[str, int]

    def __str__(self) -> str:
        sizes = [f"{name} {format_memory(size)}" for name, size in sorted(self.nbytes.items())]
        total = format_memory(sum(self.nbytes.values()))
        parts = f" ({', '.join(sizes)})" if sizes else ""
        return (
            f"rank {self.rank} of {self.world_size} on {self.device} holds {total} of symmetric "
            f"memory{parts}"
        )


class Program(NamedTuple):
    """Describe a running process that has used operators.

    Attributes:
        number: Its number (PID).
        command: Its command, its words with blanks between them.
        held: What it holds, by group.
    """

    number: int
    command: str
    held: list[HeldMemory]


class Holder(Protocol):
    """Anything that holds symmetric memory of a group."""

    def held(self) -> HeldMemory:
        """Return what it holds now."""


class _Record:
    """The record of this process."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._holders: WeakSet[Holder] = WeakSet()
        self._lock = threading.Lock()
        self._file, self._process, self._is_stale = -1, os.getpid(), False

    def write(self, holder: Holder | None = None) -> None:
        """Write what all holders hold, of which ``holder`` is one from now on.

        Where there are no anonymous files, nothing is shown.
        """
        if self._process != os.getpid():  # a forked process has a record of its own
            self._begin()
        if holder is not None:
            self._holders.add(holder)
        self._is_stale = True
        # A finalizer may interrupt this method in the same thread, so the lock must not block: who
        # has it writes once more.
        while self._is_stale and self._lock.acquire(blocking=False):
            try:
                self._is_stale = False
                self._write()
            finally:
                self._lock.release()

    def _write(self) -> None:
        # Another thread, which writes afterwards, may change what is held meanwhile.
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            if self._file < 0:
                self._file = os.memfd_create(_NAME)
            text = json.dumps([each.held()._asdict() for each in self._holders]).encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))


record = _Record()


def running_programs() -> Iterator[Program]:
    """Yield this user's running processes that have a record, in the order of their starts."""
    seen = set()
    # A forked process may have a lower number than its parent, as numbers begin anew.
    found = (process_of(int(folder.name)) for folder in Path("/proc").glob("[0-9]*"))
    processes = [process for process in found if process is not None]
    for process in sorted(processes, key=lambda each: (each.start, each.number)):
        folder = Path("/proc") / str(process.number)
        for link in _records_of(folder):
            # A process may end at any time.
            with contextlib.suppress(OSError):
                identity = link.stat().st_ino
                held = None if identity in seen else _read(link)
                seen.add(identity)  # a forked process has its parent's as well
                if held is not None:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    command = " ".join(word.decode(errors="replace") for word in words).strip()
                    yield Program(process.number, _printable(command), held)


def _records_of(folder: Path) -> list[Path]:
    """Return the open files of a process that are records; none of another user's process."""
    found = []
    with contextlib.suppress(OSError):
        for link in (folder / "fd").iterdir():
            # Others may be closed meanwhile, as the one is by which this process lists its own.
            with contextlib.suppress(OSError):
                if os.readlink(link) == f"/memfd:{_NAME} (deleted)":
                    found.append(link)
    return found


def _read(link: Path) -> list[HeldMemory] | None:
    """Return a record, or None if it is none."""
    for _ in range(_TRIES):
        with link.open("rb") as file, contextlib.suppress(ValueError, TypeError, RecursionError):
            return [_parsed(each) for each in json.loads(file.read(_MOST_BYTES))]
    return None


def _parsed(entry: dict[str, Any]) -> HeldMemory:
    """Return an entry of a record, whose texts cannot move a terminal's cursor.

    Raises:
        TypeError: It is none.
    """
    held = HeldMemory(**entry)
    if not isinstance(held.nbytes, dict) or not isinstance(held.device, str):
        raise TypeError("a record must have a device and bytes by name")
    numbers = [held.rank, held.world_size, *held.nbytes.values()]
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("ranks and bytes must be integers")
    sizes = {_printable(name): size for name, size in held.nbytes.items()}
    return held._replace(device=_printable(held.device), nbytes=sizes)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
