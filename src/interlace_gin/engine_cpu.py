"""Carry the puts of :mod:`interlace_gin.language` on the CPU backend, by messages of Gloo.

Each put is a message of numbers and one of data. For each peer one thread sends, and one receives:
it writes the data into the window and then increments the signal, as a network card would. A put
reads its source when its turn comes, so a kernel that overwrites the source too early sends wrong
data here as well. Other than on a network, messages to one peer arrive in the order of the puts.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from interlace.comm.cpu import cpu_faults
from interlace.comm.groups.carrier import Carrier, Message
from interlace.comm.groups.group import Group
from interlace.comm.runtime.deadlines import NEVER
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError, BackendError
from interlace_gin.gin import Window

_GOODBYE = 0  # no window has this handle
_GOODBYE_S = 5.0  # in which peers that close their connections, too, have said so

_addresses = itertools.count(1 << 40, 1 << 20)  # of engines, in place of memory addresses
_engines: weakref.WeakValueDictionary[int, EmulatedEngine] = weakref.WeakValueDictionary()


def engine_at(address: int) -> EmulatedEngine:
    """Return the engine whose ``address`` a kernel was given.

    Raises:
        ArgumentError: There is none, or it is closed.
    """
    engine = _engines.get(address)
    if engine is None:
        raise ArgumentError(
            f"gin must be the address of an open Gin; got {address}. Pass the address that "
            "open_gin(...) has, and keep the object."
        )
    return engine


class Put(NamedTuple):
    """Describe a put that leaves."""

    target: int
    target_start: int
    source: int
    source_start: int
    nbytes: int
    signal: int
    counter: int


class EmulatedEngine:
    """Hold windows, signals and counters of this rank, and the threads that carry puts.

    Attributes:
        address: Number of this engine in this process.
        options: Options of kernels: none.
        carrier: Its name.
    """

    carrier = "Gloo, in place of a network card"

    @makes_ordinary_tensors
    def __init__(self, group: Group, signals: int, counters: int) -> None:
        """Connect to all ranks. Collective.

        Raises:
            BackendError: Memory is simulated by the explorer, which has no network.
        """
        if cpu_faults.world() is not None:
            raise BackendError(
                "open_gin must be called outside of interlace_explorer.explore, which follows no "
                "puts over the network; got inside."
            )
        self.address, self.options = next(_addresses), dict[str, Any]()
        self._rank = group.rank
        self._memory = _CardMemory(signals, counters)
        peers = [rank for rank in range(group.world_size) if rank != group.rank]
        self._queues = {peer: queue.SimpleQueue[Put | None]() for peer in peers}
        threads = []
        # A process on its own has no store to connect by.
        if peers:
            store = group.channel.new_store("gin")
            with group.agreement.together("connecting gin"):
                carrier = Carrier(group.members, store, group.deadline_s)
            for peer, puts in self._queues.items():
                threads.append(_thread(_send, carrier, peer, self._memory, puts))
                threads.append(_thread(_receive, carrier, peer, self._memory))
        _engines[self.address] = self
        # Also if nobody closes it, and at the end of the process: a thread within Gloo at that
        # point would abort the process.
        self._end = weakref.finalize(self, _end_threads, list(self._queues.values()), threads)

    def window(self, nbytes: int) -> Window:
        """Return memory of the next handle; ranks create windows in the same order."""
        # The handle is taken first: if the memory does not fit on one rank, no rank has the window,
        # and later ones must have equal handles.
        handle = len(self._memory.windows) + 1
        self._memory.windows[handle] = torch.empty(0, dtype=torch.uint8)
        self._memory.windows[handle] = data = torch.zeros(nbytes, dtype=torch.uint8)
        return Window(handle, data)

    def put(self, peer: int, put: Put) -> None:
        """Begin a put; it is carried in the background.

        Raises:
            ArgumentError: A window, a range, a signal or a counter does not exist.
        """
        self._check(put)
        if peer == self._rank:
            self._memory.arrive(put.target, put.target_start, self._memory.source(put), put.signal)
            self._memory.count(put.counter)
            return
        cpu_faults.traffic().count_put(peer, put.nbytes)
        cpu_faults.deliver(lambda: self._queues[peer].put(put), ordered=True)

    def _check(self, put: Put) -> None:
        """Refuse what a network card would answer with an error, or with damage."""
        for role, handle, start in (
            ("target", put.target, put.target_start),
            ("source", put.source, put.source_start),
        ):
            window = self._memory.windows.get(handle)
            if window is None:
                raise ArgumentError(
                    f"gin_put: {role} must be the handle of a window; got {handle}."
                )
            if start < 0 or put.nbytes < 1 or start + put.nbytes > window.numel():
                raise ArgumentError(
                    f"gin_put: {role} must lie in its window of {window.numel()} bytes; got "
                    f"{put.nbytes} bytes from {start}."
                )
        self._memory.require_index("signal", put.signal)
        if put.counter >= 0:
            self._memory.require_index("counter", put.counter)

    def value(self, kind: str, index: int) -> int:
        """Return a signal or a counter, by ``kind``."""
        self._memory.require_index(kind, index)
        return int(self._memory.numbers[kind][index])

    def reset_counter(self, counter: int) -> None:
        """Set a counter to 0."""
        self._memory.numbers["counter"][counter] = 0

    def shadow_address(self, signal: int) -> int:
        """Return the address of an int64 that belongs to a signal."""
        self._memory.require_index("signal", signal)
        return ctypes.addressof(self._memory.shadows) + 8 * signal

    def close(self) -> None:
        """End the threads, which takes until the peers close, too; later puts go nowhere."""
        _engines.pop(self.address, None)
        self._end()


class _CardMemory:
    """Hold what a network card reaches: windows, signals and counters of this rank.

    Attributes:
        windows: Windows by handle.
        numbers: Signals and counters, by kind.
        shadows: How many puts kernels have taken, by signal.
    """

    def __init__(self, signals: int, counters: int) -> None:
        self.windows: dict[int, torch.Tensor] = {}
        self.numbers: dict[str, Any] = {
            "signal": (ctypes.c_int64 * signals)(), "counter": (ctypes.c_int64 * counters)(),
        }  # fmt: skip
        self.shadows = (ctypes.c_int64 * signals)()
        self._lock = threading.Lock()

    def source(self, put: Put) -> torch.Tensor:
        """Return the bytes that a put reads."""
        return self.windows[put.source][put.source_start : put.source_start + put.nbytes]

    def arrive(self, target: int, start: int, data: torch.Tensor, signal: int) -> None:
        """Write what has arrived, and then increment its signal."""
        self.windows[target][start : start + data.numel()].copy_(data)
        with self._lock:  # puts of several peers may have one signal
            self.numbers["signal"][signal] += 1

    def count(self, counter: int) -> None:
        """Increment a counter; -1 is none."""
        if counter >= 0:
            with self._lock:
                self.numbers["counter"][counter] += 1

    def require_index(self, kind: str, index: int) -> None:
        """Refuse a signal or a counter that does not exist.

        Raises:
            ArgumentError: It does not.
        """
        length = len(self.numbers[kind])
        if not 0 <= index < length:
            raise ArgumentError(
                f"gin: a {kind} must be one of the {length} that open_gin was asked for; got "
                f"{index}."
            )


def _thread(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Start a thread."""
    thread = threading.Thread(target=work, args=arguments, name="interlace gin", daemon=True)
    thread.start()
    return thread


def _end_threads(
    queues: list[queue.SimpleQueue[Put | None]], threads: list[threading.Thread]
) -> None:
    """Tell every peer that nothing follows, and wait for them to say so, but not for long."""
    for puts in queues:
        puts.put(None)
    end = time.monotonic() + _GOODBYE_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def _send(
    carrier: Carrier, peer: int, memory: _CardMemory, puts: queue.SimpleQueue[Put | None]
) -> None:
    """Send puts to a peer until there are no more, or the peer is gone."""
    with contextlib.suppress(RuntimeError):  # Gloo's, if the connection ends
        while True:
            put = puts.get()
            numbers = [_GOODBYE] * 4
            if put is not None:
                numbers = [put.target, put.target_start, put.nbytes, put.signal]
            messages = [torch.tensor(numbers, dtype=torch.int64)]
            if put is not None:
                messages.append(memory.source(put))
            for message in messages:
                _wait(carrier.exchange((Message(peer, message),), ()))
            if put is None:
                return
            # The data have been handed over once the wait is over, so the source may be written
            # again.
            memory.count(put.counter)


def _receive(carrier: Carrier, peer: int, memory: _CardMemory) -> None:
    """Receive a peer's puts until it says goodbye, or is gone."""
    with contextlib.suppress(RuntimeError):
        while True:
            numbers = torch.zeros(4, dtype=torch.int64)
            _wait(carrier.exchange((), (Message(peer, numbers),)))
            target, start, nbytes, signal = numbers.tolist()
            if target == _GOODBYE:
                return
            data = torch.empty(nbytes, dtype=torch.uint8)
            _wait(carrier.exchange((), (Message(peer, data),)))
            memory.arrive(target, start, data, signal)


def _wait(works: Any) -> None:
    """Wait for transfers; peers may take as long as they like."""
    for _, work in works:
        work.wait(NEVER)
