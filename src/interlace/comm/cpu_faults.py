"""The CPU backend's eyes and hands: what the kernels of this process send, and faults injected on
the way.

``interlace.language`` hands every store to a peer to :func:`deliver` while a kernel runs in the
interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from interlace.errors import ArgumentError


@dataclasses.dataclass
class Traffic:
    """What this rank sent to its peers, and fetched, since the last :meth:`reset`. Stores to itself
    do not count.

    Attributes:
        messages: puts, one for each peer that a put of a program reaches.
        message_bytes: bytes of those puts.
        signals: signals, one for each peer.
        bytes_to: bytes of puts by destination rank.
        bytes_from: bytes that copies fetched, by the rank that they are from.
        events: when each put left: (``time.monotonic()`` seconds, destination rank, bytes). None,
            the default, records nothing; set it to ``[]`` to start.
    """

    messages: int = 0
    message_bytes: int = 0
    signals: int = 0
    bytes_to: dict[int, int] = dataclasses.field(default_factory=dict)
    bytes_from: dict[int, int] = dataclasses.field(default_factory=dict)
    events: list[tuple[float, int, int]] | None = None

    def reset(self) -> None:
        self.messages = self.message_bytes = self.signals = 0
        self.bytes_to.clear()
        self.bytes_from.clear()
        if self.events is not None:
            self.events = []

    def count_put(self, peer: int, nbytes: int) -> None:
        self.messages += 1
        self.message_bytes += nbytes
        self.bytes_to[peer] = self.bytes_to.get(peer, 0) + nbytes
        if self.events is not None:
            self.events.append((time.monotonic(), peer, nbytes))

    def count_fetch(self, peer: int, nbytes: int) -> None:
        self.bytes_from[peer] = self.bytes_from.get(peer, 0) + nbytes


@dataclasses.dataclass(frozen=True)
class Faults:
    """Faults of this process's kernels on the CPU backend.

    Attributes:
        seed: of all random choices; use another one on each rank.
        max_delay_s: before every put and signal, sleep a random time up to this.
        reorder_puts: deliver puts that no fence orders in any order, as late as the program's next
            wait or end.
        die_after_puts: the process kills itself after so many puts.
    """

    seed: int = 0
    max_delay_s: float = 0.0
    reorder_puts: bool = False
    die_after_puts: int | None = None

    def __post_init__(self) -> None:
        if self.max_delay_s < 0:
            raise ArgumentError(f"max_delay_s must not be negative; got {self.max_delay_s}.")
        if self.die_after_puts is not None and self.die_after_puts < 0:
            raise ArgumentError(f"die_after_puts must not be negative; got {self.die_after_puts}.")


class World(Protocol):
    """Takes the place of real memory for every kernel of this process, as ``interlace.testing``
    does.
    """

    def send(self, addresses: Any, values: Any, kind: str) -> None:
        """Store arrays of values at arrays of addresses; ``kind`` is put, release or relaxed, as
        the primitive is.
        """

    def fence(self) -> None:
        """Order what the running program has put before what it puts next."""

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy between two addresses, in stream order."""

    def pause(self) -> None:
        """A program looks at memory that has not changed."""


class _State:
    """Of this process; kernels of one process run one after another in the interpreter."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.faults: Faults | None = None
        self.random = random.Random(0)
        self.puts = 0
        self.pending: list[Callable[[], None]] = []
        self.world: World | None = None


_state = _State()


@contextlib.contextmanager
def living_in(world: World) -> Iterator[None]:
    """Hand all that kernels and copies of this process do to symmetric memory to ``world``
    meanwhile.
    """
    previous = _state.world, _state.traffic
    _state.world = world
    try:
        yield
    finally:
        _state.world, _state.traffic = previous


def world() -> World | None:
    """What stands for real memory; None, nearly always, for real memory itself."""
    return _state.world


@contextlib.contextmanager
def inject(faults: Faults) -> Iterator[None]:
    """Inject ``faults`` into every kernel that this process runs on the CPU backend meanwhile."""
    previous = _state.faults, _state.random, _state.puts
    _state.faults, _state.random, _state.puts = faults, random.Random(faults.seed), 0
    try:
        yield
    finally:
        _state.faults, _state.random, _state.puts = previous


@contextlib.contextmanager
def counting(traffic: Traffic) -> Iterator[None]:
    """Count what kernels send into ``traffic`` meanwhile, and deliver what is still under way at
    the end.
    """
    previous, _state.traffic = _state.traffic, traffic
    try:
        yield
        flush()
    finally:
        _state.pending.clear()
        _state.traffic = previous


def traffic() -> Traffic:
    """Where the running kernel's puts are counted."""
    return _state.traffic


def deliver(store: Callable[[], None], *, ordered: bool) -> None:
    """Perform a store to a peer: now, or, under ``reorder_puts`` and if no order is asked for, at
    any later time.
    """
    faults = _state.faults
    if faults is None:
        store()
        return
    if faults.max_delay_s:
        time.sleep(_state.random.uniform(0, faults.max_delay_s))
    if faults.die_after_puts is not None and _state.puts >= faults.die_after_puts:
        os.kill(os.getpid(), signal.SIGKILL)
    _state.puts += 1
    if not faults.reorder_puts:
        store()
    elif ordered:
        flush()
        store()
    else:
        _state.pending.append(store)
        while len(_state.pending) > 1 and _state.random.random() < 0.5:
            _deliver_one()


def move(target: int, source: int, nbytes: int) -> None:
    """Copy memory of this process, as a copy engine would."""
    if _state.world is not None:
        _state.world.move(target, source, nbytes)
    else:
        ctypes.memmove(target, source, nbytes)


def flush() -> None:
    """Deliver every pending put, in random order: what a fence waits for."""
    if _state.world is not None:
        _state.world.fence()
    while _state.pending:
        _deliver_one()


def progress() -> None:
    """Deliver one pending put: a network goes on while a program waits."""
    if _state.world is not None:
        _state.world.pause()
    if _state.pending:
        _deliver_one()


def _deliver_one() -> None:
    _state.pending.pop(_state.random.randrange(len(_state.pending)))()
