"""Copy by the GPU's copy engines, which occupy no SM; the CPU backend copies by itself."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from interlace.comm.cpu import cpu_faults
from interlace.comm.runtime.deadlines import pauses_of_a_wait
from interlace.comm.runtime.driver import driver, require_enqueued
from interlace.errors import BackendError

if TYPE_CHECKING:
    from interlace.comm.groups.group import Group


def beside(
    group: Group, *, first: bool = False, since: torch.cuda.Event | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return a context whose work is enqueued on a side stream, concurrent with the current stream.

    The work runs after everything that the current stream has got before, and concurrently with
    everything that it gets later. End with :func:`join`. The CPU backend runs the work at once.

    Args:
        group: The group that the work belongs to.
        first: Give SMs to launches of the side stream before those of the current stream. Pass the
            same value to :func:`join`.
        since: Run also concurrently with the work that the current stream has got after this event
            (see :func:`so_far`).
    """
    if group.backend == "cpu":
        return contextlib.nullcontext()
    # The side stream must not overtake the work that its copies read.
    side = group.streams.side(first)
    if since is None:
        group.streams.follow(side, group.streams.current())
    else:
        side.wait_event(since)
    return group.streams.on(side)


def join(group: Group, *, first: bool = False) -> None:
    """Make the current stream wait for all work that runs :func:`beside` it.

    Args:
        group: The group that the work belongs to.
        first: The value that was passed to :func:`beside`.
    """
    if group.backend == "cuda":
        group.streams.follow(group.streams.current(), group.streams.side(first))


def so_far(group: Group) -> torch.cuda.Event | None:
    """Return an event after everything that the current stream has got, for :func:`wait_for`.

    On the CPU backend, where work runs at once, return None.
    """
    return group.streams.current().record_event() if group.backend == "cuda" else None


def wait_for(group: Group, event: torch.cuda.Event | None) -> None:
    """Make the current stream wait for ``event``, which :func:`so_far` has returned."""
    if event is not None:
        group.streams.current().wait_event(event)


def fetch(group: Group, target: int, source: int, nbytes: int, peer: int) -> None:
    """Copy from ``peer``'s memory to this rank's on the current stream.

    Args:
        group: The group of both ranks.
        target: Address of the copy, mapped in this process.
        source: Address of the data in ``peer``'s memory, mapped in this process.
        nbytes: Bytes to copy.
        peer: Rank that owns the source.

    Raises:
        BackendError: The driver refuses the copy.
    """
    if group.backend == "cpu":
        cpu_faults.move(target, source, nbytes)
        if peer != group.rank:
            cpu_faults.traffic().count_fetch(peer, nbytes)
    else:
        _copy(target, source, nbytes, group.streams.current())


def _copy(target: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
    """Enqueue a copy of ``nbytes`` on ``stream``."""
    result = driver().cuMemcpyDtoDAsync(target, source, nbytes, stream.cuda_stream)
    require_enqueued(result, "a copy of %d bytes", nbytes)


# Copies to peers


class Transfer(NamedTuple):
    """Describe a copy to a peer's memory.

    Attributes:
        target: Address in ``peer``'s memory, mapped in this process.
        source: Address in this rank's memory.
        nbytes: Number of bytes.
        peer: Rank that receives the data.
    """

    target: int
    source: int
    nbytes: int
    peer: int


def signal(group: Group, transfer: Transfer) -> None:
    """Set a signal on a peer by a copy, after all earlier copies of the current stream.

    Raises:
        BackendError: The driver refuses the copy.
    """
    if group.backend == "cpu":
        _move(transfer)
        cpu_faults.traffic().signals += 1
    else:
        _copy(transfer.target, transfer.source, transfer.nbytes, group.streams.current())


# Copies to peers, concurrent with kernels


def push(group: Group, transfers: Sequence[Transfer]) -> None:
    """Copy data that the current stream has computed to peers, concurrent with its next work.

    End with :func:`join`.

    Raises:
        BackendError: The driver refuses a copy.
    """
    if group.backend == "cpu":
        for transfer in transfers:
            _move(transfer)
            group.traffic.count_put(transfer.peer, transfer.nbytes)
        return
    if not transfers:
        return
    with group.on_device():
        side = group.streams.side(False)
        group.streams.follow(side, group.streams.current())
        for transfer in transfers:
            _copy(transfer.target, transfer.source, transfer.nbytes, side)


def _move(transfer: Transfer) -> None:
    """Copy on the CPU backend, subject to injected faults."""
    copy = functools.partial(cpu_faults.move, transfer.target, transfer.source, transfer.nbytes)
    cpu_faults.deliver(copy, ordered=True)


@dataclasses.dataclass(frozen=True)
class Triggered:
    """Describe a transfer that begins once a counter of this rank has reached a value.

    Attributes:
        counter: Address of the counter, int32.
        value: Smallest value at which the transfer may begin.
        transfer: The copy.
    """

    counter: int
    value: int
    transfer: Transfer


class TransferQueue:
    """Run transfers one after another while a kernel runs that counts towards their values.

    A transfer begins as soon as its predecessor has ended and its counter has reached its value. On
    CUDA the copies wait in a stream of their own, by the driver's stream memory operations; on the
    CPU backend they wait in a thread.
    """

    def __init__(self, group: Group, queue: Sequence[Triggered]) -> None:
        """Create the queue; nothing is enqueued yet.

        Raises:
            BackendError: The driver has no stream memory operations.
        """
        if group.backend == "cuda" and not supports_triggers(group.device):
            raise BackendError(
                "triggered transfers must have a CUDA driver with stream memory operations; this "
                "one has none (see "
                "`interlace doctor`). Take a mapped output, or another impl."
            )
        self._group, self._queue = group, list(queue)
        self._start: torch.cuda.Event | None = None
        self._thread: _CopyThread | None = None

    def arm(self, owner: object) -> None:
        """Prepare for the kernel that counts, which the current stream gets next.

        The counters must be zero at this point of the current stream.

        Args:
            owner: Object that owns the memory at the transfers' addresses. Nothing is copied once
                it is gone.
        """
        if self._group.backend == "cpu":
            self._thread = _CopyThread(self._queue, owner)
            self._thread.start()
        else:
            # The copies' stream waits for this point before it looks at the counters, which are
            # zero only from here on.
            self._start = so_far(self._group)

    def release(self) -> None:
        """Enqueue the transfers, after the kernel was launched; end with :func:`join`.

        Raises:
            BackendError: The driver refuses a wait or a copy.
        """
        if self._thread is not None:
            self._thread.join()
            failure, self._thread = self._thread.failure, None
            if failure is not None:
                raise failure
            for triggered in self._queue:
                transfer = triggered.transfer
                self._group.traffic.count_put(transfer.peer, transfer.nbytes)
        if self._start is None or not self._queue:
            return
        with self._group.on_device():
            side = self._group.streams.side(False)
            # The waits come here and not in ``arm``: streams may share a queue to the device, in
            # which a wait that is enqueued before the kernel would hold the kernel back for ever.
            side.wait_event(self._start)
            for triggered in self._queue:
                transfer = triggered.transfer
                stream_waits_for(triggered.counter, triggered.value, side)
                _copy(transfer.target, transfer.source, transfer.nbytes, side)
        self._start = None

    def disarm(self) -> None:
        """Cancel the transfers, as no kernel will count."""
        if self._thread is not None:
            self._thread.cancelled = True
            self._thread.join()
        self._start = self._thread = None


def require_queues(group: Group, subject: str) -> None:
    """Refuse a capture that would hang when its graph is replayed.

    Args:
        group: The group that calls.
        subject: What waits for counters, for the error.

    Raises:
        BackendError: A CUDA graph is being captured, and a single queue leads to the device.
    """
    if has_single_queue() and group.capture_id() is not None:
        raise BackendError(
            f"CUDA graphs with {subject} must have CUDA_DEVICE_MAX_CONNECTIONS above 1; got 1, "
            "with which a graph may "
            "put a wait before the kernel that it is for. Unset it, or call outside a graph."
        )


def has_single_queue() -> bool:
    """Return whether a single queue leads to each device, as the program asks for."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def supports_triggers(device: torch.device) -> bool:
    """Return whether the driver has stream memory operations on a GPU."""
    cu = driver()
    attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    error, number = cu.cuDeviceGet(device.index)
    if int(error) == 0:
        error, able = cu.cuDeviceGetAttribute(attribute, number)
    return int(error) == 0 and bool(able)


def stream_waits_for(counter: int, value: int, stream: torch.cuda.Stream) -> None:
    """Make ``stream`` wait until the int32 at ``counter`` is at least ``value``."""
    cu = driver()
    at_least = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    result = cu.cuStreamWaitValue32(stream.cuda_stream, counter, value, at_least)
    require_enqueued(result, "a stream's wait for a counter")


class _CopyThread(threading.Thread):
    """Copy in a thread, as the CPU backend's copy engine.

    The thread ends after its transfers, or when it is cancelled, or when the owner of the memory is
    gone.
    """

    def __init__(self, queue: Sequence[Triggered], owner: object) -> None:
        super().__init__(name="interlace copies", daemon=True)
        self._queue, self._owner = queue, weakref.ref(owner)
        self.cancelled = False
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Copy until the queue is empty, the thread is cancelled, or the owner is gone."""
        try:
            for triggered in self._queue:
                pauses = pauses_of_a_wait()
                while not self._copy_if_due(triggered):
                    # The kernel has failed, or was never launched.
                    if self.cancelled or self._owner() is None:
                        return
                    time.sleep(next(pauses))
        except BaseException as error:
            self.failure = error

    def _copy_if_due(self, triggered: Triggered) -> bool:
        """Copy if the counter has reached its value; return whether it has."""
        # The reference keeps the memory alive while its counter is read and its data is copied.
        owner = self._owner()
        count = 0 if owner is None else ctypes.c_int32.from_address(triggered.counter).value
        if owner is None or count < triggered.value:
            return False
        _move(triggered.transfer)
        return True
