"""Count and deliver the traffic of the CPU backend, and inject faults into it.

``interlace.language`` hands every store to a peer to :func:`deliver` while a kernel runs in the
interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import numbers
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from interlace.errors import ArgumentError


@dataclasses.dataclass
class Traffic:
    """Count the data that this rank sends to its peers, and fetches from them.

    Stores to the rank itself do not count.

    Attributes:
        messages: Number of puts; a put of a program that reaches several peers counts once per
            peer.
        message_bytes: Bytes of those puts.
        signals: Number of signals, once per peer.
        bytes_to: Bytes of puts by destination rank.
        bytes_from: Bytes that copies fetched, by source rank.
    """

    messages: int = 0
    message_bytes: int = 0
    signals: int = 0
    bytes_to: dict[int, int] = dataclasses.field(default_factory=dict)
    bytes_from: dict[int, int] = dataclasses.field(default_factory=dict)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.messages = self.message_bytes = self.signals = 0
        self.bytes_to.clear()
        self.bytes_from.clear()

    def count_put(self, peer: int, nbytes: int) -> None:
        """Count a put of ``nbytes`` to ``peer``."""
        self.messages += 1
        self.message_bytes += nbytes
        self.bytes_to[peer] = self.bytes_to.get(peer, 0) + nbytes

    def add(self, other: Traffic, ranks: Sequence[int]) -> None:
        """Add what ``other`` has counted, whose peer ``i`` is ``ranks[i]`` here."""
        self.messages += other.messages
        self.message_bytes += other.message_bytes
        self.signals += other.signals
        for peer, nbytes in other.bytes_to.items():
            self.bytes_to[ranks[peer]] = self.bytes_to.get(ranks[peer], 0) + nbytes

    def count_fetch(self, peer: int, nbytes: int) -> None:
        """Count a copy of ``nbytes`` from ``peer``'s memory."""
        self.bytes_from[peer] = self.bytes_from.get(peer, 0) + nbytes


@dataclasses.dataclass(frozen=True)
class Faults:
    """Describe faults of this process's kernels on the CPU backend.

    Attributes:
        seed: Seed of all random choices; use a different seed per rank.
        max_delay_s: Largest number of seconds of a random sleep before every put and signal.
        reorder_puts: Deliver puts that no fence orders in a random order, as late as the program's
            next wait or its end.
        die_after_puts: Number of puts after which the process kills itself; None: it does not.

    Raises:
        ArgumentError: ``seed`` is no whole number, or ``max_delay_s`` or ``die_after_puts`` is none
            from 0 on.
    """

    seed: int = 0
    max_delay_s: float = 0.0
    reorder_puts: bool = False
    die_after_puts: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.seed, numbers.Integral):
            raise ArgumentError(f"Faults: seed must be a whole number; got {self.seed!r}.")
        delay, puts = self.max_delay_s, self.die_after_puts
        if not isinstance(delay, numbers.Real) or not 0 <= delay < math.inf:
            raise ArgumentError(f"Faults: max_delay_s must be seconds from 0 on; got {delay!r}.")
        if puts is not None and not (isinstance(puts, numbers.Integral) and puts >= 0):
            raise ArgumentError(
                f"Faults: die_after_puts must be a whole number from 0 on, or None; got {puts!r}."
            )


class World(Protocol):
    """Replace real memory for every kernel of this process; see ``interlace_explorer``."""

    def send(self, addresses: Any, values: Any, kind: str) -> None:
        """Store an array of values at an array of addresses.

        Args:
            addresses: Address of each value.
            values: The values.
            kind: Name of the primitive: put, release or relaxed.
        """

    def fence(self) -> None:
        """Order the puts of the running program before this point before its next ones."""

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` between two addresses, in stream order."""

    def pause(self) -> None:
        """Note that a program has read memory that has not changed."""


class _State:
    """Hold the state of this process, whose interpreted kernels run one after another."""

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
    """Redirect all accesses of kernels and copies to symmetric memory to ``world``."""
    previous = _state.world, _state.traffic
    _state.world = world
    try:
        yield
    finally:
        _state.world, _state.traffic = previous


def world() -> World | None:
    """Return the substitute for real memory, or None if kernels access real memory."""
    return _state.world


@contextlib.contextmanager
def inject(faults: Faults) -> Iterator[None]:
    """Inject ``faults`` into every kernel that this process runs within the context.

    Raises:
        ArgumentError: ``faults`` are no :class:`Faults`.
    """
    if not isinstance(faults, Faults):
        raise ArgumentError(f"inject: faults must be interlace.Faults; got {faults!r}.")
    previous = _state.faults, _state.random, _state.puts
    _state.faults, _state.random, _state.puts = faults, random.Random(faults.seed), 0
    try:
        yield
    finally:
        _state.faults, _state.random, _state.puts = previous


@contextlib.contextmanager
def counting(traffic: Traffic) -> Iterator[None]:
    """Count puts and signals in ``traffic``, and deliver pending puts at the end of the context.

    If the context ends with an exception, pending puts are dropped.
    """
    previous, _state.traffic = _state.traffic, traffic
    try:
        yield
        flush()
    finally:
        _state.pending.clear()
        _state.traffic = previous


def traffic() -> Traffic:
    """Return the count that the running kernel's puts go to."""
    return _state.traffic


def deliver(store: Callable[[], None], *, ordered: bool) -> None:
    """Perform a store to a peer, subject to the injected faults.

    Args:
        store: Performs the store.
        ordered: Perform the store after all pending puts. If False, and puts are reordered, it may
            be performed at any later time.
    """
    faults = _state.faults
    if faults is None:
        store()
        return
    if faults.max_delay_s:
        time.sleep(_state.random.uniform(0, faults.max_delay_s))
    if faults.die_after_puts is not None and _state.puts >= faults.die_after_puts:
        # The signal that no process can handle, as a machine that fails gives no notice.
        os.kill(os.getpid(), signal.SIGKILL)
    _state.puts += 1
    if not faults.reorder_puts:
        store()
    elif ordered:
        # A signal releases all earlier puts, so none of them may arrive after it.
        flush()
        store()
    else:
        # As in a network, an earlier put may be delivered now, and this put after later ones.
        _state.pending.append(store)
        while len(_state.pending) > 1 and _state.random.random() < 0.5:
            _deliver_random()


def move(target: int, source: int, nbytes: int) -> None:
    """Copy ``nbytes`` between two addresses of this process, as a copy engine would."""
    if _state.world is not None:
        _state.world.move(target, source, nbytes)
    else:
        ctypes.memmove(target, source, nbytes)


def flush() -> None:
    """Deliver every pending put, in random order, as a fence requires."""
    if _state.world is not None:
        _state.world.fence()
    while _state.pending:
        _deliver_random()


def progress() -> None:
    """Deliver one pending put, as a network makes progress while a program waits."""
    if _state.world is not None:
        _state.world.pause()
    if _state.pending:
        _deliver_random()


def _deliver_random() -> None:
    """Deliver a random pending put."""
    _state.pending.pop(_state.random.randrange(len(_state.pending)))()
