"""Copies by the GPU's copy engines, which take no processor; on the CPU backend, by the processor
there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from interlace.comm import cpu_faults
from interlace.comm.group import Group
from interlace.errors import BackendError

_LOOK_S = 2e-4  # between two looks at a counter, on the CPU backend


@contextlib.contextmanager
def beside(
    group: Group, *, first: bool = False, since: torch.cuda.Event | None = None
) -> Iterator[None]:
    """What is enqueued within runs beside what the current stream gets later, and after what it got
    before.

    End with :func:`join`. The CPU backend runs it at once.

    Args:
        first: let its launches have processors before the current stream's; for the whole of one
            ``beside`` and ``join``.
        since: what the current stream got after this, too (see :func:`so_far`).
    """
    if group.backend == "cpu":
        yield
        return
    side = group.streams.side(first)
    side.wait_event(since or group.streams.current().record_event())
    with torch.cuda.stream(side):
        yield


def join(group: Group, *, first: bool = False) -> None:
    """Let the current stream go on once all that ran :func:`beside` it is done."""
    if group.backend == "cuda":
        group.streams.current().wait_event(group.streams.side(first).record_event())


def so_far(group: Group) -> torch.cuda.Event | None:
    """All that the current stream has got until now, for :func:`wait_for`."""
    return group.streams.current().record_event() if group.backend == "cuda" else None


def wait_for(group: Group, event: torch.cuda.Event | None) -> None:
    """Let the current stream go on once what ``event`` stands for is done."""
    if event is not None:
        group.streams.current().wait_event(event)


def fetch(
    group: Group,
    target: int,
    source: int,
    nbytes: int,
    peer: int,
    *,
    count: int = 1,
    distance: int = 0,
) -> None:
    """Copy ``nbytes`` between two addresses mapped here, the source in ``peer``'s memory, on the
    current stream.

    Args:
        count: how often, one behind the other in the source.
        distance: bytes from one to the next in the target.

    Raises:
        BackendError: the driver refuses.
    """
    if group.backend == "cpu":
        for which in range(count):
            cpu_faults.move(target + which * distance, source + which * nbytes, nbytes)
        if peer != group.rank:
            cpu_faults.traffic().count_fetch(peer, count * nbytes)
    elif count == 1:
        _copy(target, source, nbytes, group.streams.current())
    else:
        _copy_apart(target, source, nbytes, count, distance, group.streams.current())


def _copy(target: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
    driver = _driver()
    (error,) = driver.cuMemcpyDtoDAsync(target, source, nbytes, stream.cuda_stream)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(
            f"a copy of {nbytes} bytes must be accepted by the CUDA driver; got {error.name}."
        )


def _copy_apart(
    target: int, source: int, nbytes: int, count: int, distance: int, stream: torch.cuda.Stream
) -> None:
    """One copy of ``count`` pieces: small ones by themselves would take the copy engines longer to
    begin than to move.
    """
    driver = _driver()
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.srcPitch = source, nbytes
    copy.dstDevice, copy.dstPitch = target, distance
    copy.WidthInBytes, copy.Height = nbytes, count
    (error,) = driver.cuMemcpy2DAsync(copy, stream.cuda_stream)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(
            f"a copy of {count} times {nbytes} bytes must be accepted by the CUDA driver; got "
            f"{error.name}."
        )


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


# Copies to peers, beside kernels


class Transfer(NamedTuple):
    """A copy to ``peer``'s memory; addresses are mapped here."""

    target: int
    source: int
    nbytes: int
    peer: int


def push(group: Group, transfers: Sequence[Transfer]) -> None:
    """Copy what the current stream has made so far, beside what it gets next. End with
    :func:`join`.

    Raises:
        BackendError: the driver refuses.
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
        side.wait_event(group.streams.current().record_event())
        for transfer in transfers:
            _copy(transfer.target, transfer.source, transfer.nbytes, side)


def _move(transfer: Transfer) -> None:
    def copy() -> None:
        cpu_faults.move(transfer.target, transfer.source, transfer.nbytes)

    cpu_faults.deliver(copy, ordered=True)


@dataclasses.dataclass(frozen=True)
class Triggered:
    """A transfer that begins once a counter of this rank, int32 at an address, has come to
    ``value``.
    """

    counter: int
    value: int
    transfer: Transfer


class TransferQueue:
    """Transfers that run one after another beside a kernel, each as soon as that kernel has counted
    to its value.

    On CUDA copies wait in a stream of their own, by the driver's stream memory operations; on the
    CPU backend in a thread.
    """

    def __init__(self, group: Group, queue: Sequence[Triggered]) -> None:
        """Create the queue; nothing is enqueued yet.

        Raises:
            BackendError: the driver has no stream memory operations.
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

    def require_queues(self) -> None:
        """Refuse what would hang.

        Raises:
            BackendError: a CUDA graph is being captured, and one queue leads to the device.
        """
        one = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        if one and self._group.capture_id() is not None:
            raise BackendError(
                "CUDA graphs with triggered transfers must have CUDA_DEVICE_MAX_CONNECTIONS above "
                "1; got 1, with which a graph may "
                "put a wait before the kernel that it is for. Unset it, or call outside a graph."
            )

    def arm(self, owner: object) -> None:
        """Counters are zero from here on, in the order of the current stream; the kernel that
        counts comes next.

        Args:
            owner: of the memory at the transfers' addresses. Nothing is copied once it is gone.
        """
        if self._group.backend == "cpu":
            self._thread = _CopyThread(self._queue, owner)
            self._thread.start()
        else:
            self._start = so_far(self._group)

    def release(self) -> None:
        """Enqueue the transfers. To be called after the kernel was launched; end with :func:`join`.

        After it, and not in :meth:`arm`: streams may share a queue to the device, in which a wait
        that came before the kernel would hold it back for ever.

        Raises:
            BackendError: the driver refuses.
        """
        if self._thread is not None:
            self._thread.join()
            failure, self._thread = self._thread.failure, None
            if failure is not None:
                raise failure
            for each in self._queue:
                self._group.traffic.count_put(each.transfer.peer, each.transfer.nbytes)
        if self._start is None or not self._queue:
            return
        with self._group.on_device():
            side = self._group.streams.side(False)
            side.wait_event(self._start)
            for each in self._queue:
                _wait_value(each.counter, each.value, side)
                _copy(each.transfer.target, each.transfer.source, each.transfer.nbytes, side)
        self._start = None

    def disarm(self) -> None:
        """No kernel will count: nothing is transferred."""
        if self._thread is not None:
            self._thread.wanted = False
            self._thread.join()
        self._start = self._thread = None


def supports_triggers(device: torch.device) -> bool:
    """Whether the driver has stream memory operations on this GPU."""
    driver = _driver()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    error, number = driver.cuDeviceGet(device.index)
    if error == driver.CUresult.CUDA_SUCCESS:
        error, able = driver.cuDeviceGetAttribute(attribute, number)
    return error == driver.CUresult.CUDA_SUCCESS and bool(able)


def _wait_value(counter: int, value: int, stream: torch.cuda.Stream) -> None:
    driver = _driver()
    at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    (error,) = driver.cuStreamWaitValue32(stream.cuda_stream, counter, value, at_least)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(
            f"a stream's wait for a counter must be accepted by the CUDA driver; got {error.name}."
        )


class _CopyThread(threading.Thread):
    """The CPU backend's copy engine. It ends with its transfers, or once nobody is left who could
    ask for them.
    """

    def __init__(self, queue: Sequence[Triggered], owner: object) -> None:
        super().__init__(name="interlace copies", daemon=True)
        self._queue, self._owner = queue, weakref.ref(owner)
        self.wanted = True
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for each in self._queue:
                while not self._carry(each):
                    if not self.wanted or self._owner() is None:  # the kernel failed, or never came
                        return
                    time.sleep(_LOOK_S)
        except BaseException as error:
            self.failure = error

    def _carry(self, each: Triggered) -> bool:
        """Copy if it is time; whether it was."""
        owner = self._owner()  # and with it the memory, for as long as this takes
        if owner is None or ctypes.c_int32.from_address(each.counter).value < each.value:
            return False
        _move(each.transfer)
        return True
