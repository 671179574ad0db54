"""Order the calls of a GPU across its streams and groups, report captures of CUDA graphs, and count
launches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.comm.runtime.conditions import Condition, has, returns
from interlace.comm.runtime.deadlines import FAILED_S
from interlace.comm.runtime.driver import driver, require_enqueued
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import GroupError, WorkspaceError

_POLL_S = 20e-6
"""Seconds between two looks at whether a GPU is idle: programs time their steps by that."""


class StreamOrder:
    """Remember the streams of one GPU and the stream of the most recent call of any group.

    Attributes:
        streams: Stream objects by their CUDA handle.
        executed: Stream of the most recent call that was enqueued to run.
        captured: Stream of the most recent call that was captured in a CUDA graph.
    """

    def __init__(self) -> None:
        self.streams: dict[int, torch.cuda.Stream] = {}
        self.executed: torch.cuda.Stream | None = None
        self.captured: torch.cuda.Stream | None = None


_orders: dict[int, StreamOrder] = {}  # one per GPU and process, shared by all its groups


class Streams:
    """Provide the streams of a group's device, and keep the order of calls.

    On the CPU backend nothing is captured and there is nothing to order.

    Attributes:
        device: The group's device.
        on_gpu: Whether the device is a GPU; cheaper to read than the device's type.
    """

    def __init__(self, device: torch.device) -> None:
        """Use the streams of ``device``.

        Raises:
            GroupError: The device is a GPU without an index.
        """
        if device.type == "cuda" and device.index is None:
            raise GroupError(
                f"a group's device must have an index; got {device}. Use torch.device('cuda', "
                "local_rank)."
            )
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._order = _orders.setdefault(
            -1 if device.index is None else device.index, StreamOrder()
        )
        self._side_streams: dict[tuple[bool, int], torch.cuda.Stream] = {}
        self._passing: torch.cuda.Event | None = None

    def current(self) -> torch.cuda.Stream:
        """Return the current stream of the GPU; equal streams are the same object."""
        # torch makes a new object in each call, which costs as much as a launch, and calls of
        # operators ask many times. So stream objects are remembered by handle.
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        streams = self._order.streams
        if handle not in streams:
            streams[handle] = torch.cuda.current_stream(self.device)
        return streams[handle]

    def side(self, first: bool, number: int = 0) -> torch.cuda.Stream:
        """Return a stream for copies and exchanges that run concurrently with a kernel.

        See ``interlace.comm.groups.copies`` and ``interlace.comm.groups.slices``.

        Args:
            first: Return a stream of high priority instead of one of default priority.
            number: Which of these streams.
        """
        key = first, number
        if key not in self._side_streams:
            self._side_streams[key] = torch.cuda.Stream(self.device, priority=-1 if first else 0)
        return self._side_streams[key]

    def on(self, stream: torch.cuda.Stream) -> OnStream:
        """Return a context in which ``stream``, of the group's GPU, is torch's current one; that
        GPU must be the current one already.
        """
        return OnStream(stream, self.current())

    def follow(self, stream: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """Make what ``stream`` gets from here on follow what another stream has got so far.

        As ``Stream.wait_stream``, with one event for all times, as a wait is for what the event
        has recorded last before it: to make one takes the host longer than what it is for.
        """
        if self._passing is None:
            self._passing = torch.cuda.Event()
        self._passing.record(earlier)
        stream.wait_event(self._passing)

    def synchronize(self, is_broken: Callable[[], bool] = lambda: False) -> None:
        """Wait until the GPU is idle; return at once on the CPU backend.

        Args:
            is_broken: Returns whether a call has failed. Kernels of this package end then, but a
                collective of NCCL whose peers make another call may wait for ever; this returns
                without it some seconds later.
        """
        if not self.on_gpu:
            return
        with self.on_device():
            done = torch.cuda.Event()
            done.record()
        end = math.inf
        while not done.query():
            if is_broken():
                end = min(end, time.monotonic() + FAILED_S)
                if time.monotonic() > end:
                    return
            time.sleep(_POLL_S)
        torch.cuda.synchronize(self.device)

    def current_device_differs(self) -> bool:
        """Return whether torch's current device is a GPU that is not the group's."""
        return self.on_gpu and torch._C._cuda_getDevice() != self.device.index

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the group's GPU is torch's current device."""
        if self.current_device_differs():
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def capturing(self) -> bool:
        """Return whether the GPU's current stream is being captured in a CUDA graph."""
        if not self.on_gpu:
            return False
        if self.current_device_differs():
            with torch.cuda.device(self.device):
                return torch.cuda.is_current_stream_capturing()
        return torch.cuda.is_current_stream_capturing()

    def capture_id(self) -> int | None:
        """Return the driver's id of the capture of the GPU's current stream, or None."""
        return _capture_of(self.current()) if self.capturing() else None

    def continues(self) -> bool:
        """Return whether a call would follow the most recent one on its stream, on torch's current
        GPU, so that there is nothing to order.
        """
        return (
            torch._C._cuda_getDevice() == self.device.index
            and self.current() is self._order.executed
        )

    def conditions(self) -> tuple[Condition, ...]:
        """Return the conditions that a call follows the most recent one, as :meth:`continues` says,
        on the stream that is torch's current one now, and that nobody captures it.
        """
        return (
            returns(torch._C._cuda_getDevice),
            returns(torch._C._cuda_getCurrentRawStream, self.device.index),
            has(self._order, "executed"),
            returns(torch._C._cuda_isCurrentStreamCapturing),
        )

    def follow_last_call(self) -> None:
        """Order this call after the most recent call of any group on this GPU.

        Two kernels that wait for peers must not overlap: with their order reversed on another rank,
        each could occupy the SMs that the other's peer needs. During a capture, only calls within
        the same capture can be ordered; a graph is ordered by its position when it is replayed.

        Raises:
            WorkspaceError: The stream of the most recent call is captured, and this one is not.
        """
        stream, order = self.current(), self._order
        # Calls on one stream are in order already.
        if stream is order.executed:
            return
        capture = self.capture_id()
        if capture is not None:
            # A wait for a stream outside of the capture would make the capture invalid.
            for previous in (order.executed, order.captured):
                if (
                    previous is not None
                    and previous is not stream
                    and _capture_of(previous) == capture
                ):
                    stream.wait_stream(previous)
            order.captured = stream
            return
        if order.executed is not None:
            # A wait for a captured stream would pull this stream into that capture.
            if _capture_of(order.executed) is not None:
                raise WorkspaceError(
                    "calls on one GPU must be ordered; got one while the stream of the last one "
                    "captures a CUDA graph. Finish the capture first."
                )
            stream.wait_stream(order.executed)
        order.executed = stream

    @makes_ordinary_tensors
    def upload(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        """Return numbers as an int64 tensor on the device, for calls on any stream.

        The host does not wait for the GPU: what a call needs for the first time, such as a table
        for a new number of rows, may be wanted while the GPU has yet to run much of what was
        enqueued before.

        Raises:
            WorkspaceError: As :meth:`follow_last_call`, as later calls follow the copy.
            BackendError: The driver refuses the copy.
        """
        if not self.on_gpu:
            return torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self.follow_last_call()
        on_host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        uploaded = torch.empty_like(on_host, device=self.device)
        # The driver takes the numbers before it returns, which it does without waiting for the
        # stream; PyTorch would wait, and would take longer to find pinned memory.
        result = driver().cuMemcpyHtoDAsync(
            uploaded.data_ptr(), on_host.data_ptr(), on_host.nbytes, self.current().cuda_stream
        )
        require_enqueued(result, "a copy of %d bytes", on_host.nbytes)
        return uploaded


def _capture_of(stream: torch.cuda.Stream) -> int | None:
    """Return the driver's id of the capture that ``stream`` is in, or None."""
    cu = driver()
    # The driver returns the error, the status and the id; the remaining values differ between
    # versions of the bindings.
    _, status, capture_id, *_ = cu.cuStreamGetCaptureInfo(stream.cuda_stream)
    if status == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return int(capture_id)
    return None


class OnStream:
    """A context in which a stream of torch's current GPU is its current one.

    ``torch.cuda.stream`` does the same for any GPU, and takes the host ten times as long.
    """

    def __init__(self, stream: torch.cuda.Stream, previous: torch.cuda.Stream) -> None:
        """Make ``stream`` the current one within, and ``previous`` behind it."""
        self._stream, self._previous = stream, previous

    def __enter__(self) -> None:
        _make_current(self._stream)

    def __exit__(self, *_: object) -> None:
        _make_current(self._previous)


def _make_current(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


@dataclasses.dataclass
class Launches:
    """Count the kernels that this process has launched.

    If the count has changed since a call began, a kernel of the call may be running. It grows only,
    except that launches are subtracted again if they did not take place.

    Attributes:
        value: Number of launches.
    """

    value: int = 0


launches = Launches()
"""Count of this process: incremented before every launch of
:class:`interlace.comm.launching.kernels.Launch` and before every replay of a group's graphs.
"""
