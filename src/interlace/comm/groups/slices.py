"""Slices: pieces of memory that leave for ranks of other nodes while a kernel still computes.

A slice is a contiguous piece of this rank's memory with a counter and one destination. The kernel
adds to the counter with release order; once the counter has reached the slice's value, the slice is
sent. It arrives in a *landing*, memory of the destination that no other rank writes. The contract
is that of triggered transfers (:mod:`interlace.comm.groups.copies`): a queue is *armed* before the
kernel, *released* after the kernel was launched, and *joined* before the landings are read::

    queue = SliceQueue(group, OPERATOR, steps, mark)
    queue.arm()           # counters are zero from here on
    launch()              # the kernel counts
    queue.release()       # side streams: wait for a counter, exchange; and so on
    queue.join()          # the current stream waits for all arrivals

Slices are exchanged in *steps*: in step k a rank sends to and receives from each of its peers at
most one slice, with which a stamp may travel. All ranks have the same steps in the same order. A
step begins when its counters have reached their values on this rank. Work that needs the slices up
to a step only calls ``wait(step)`` first.

On CUDA side streams, one for each lane of the carrier, wait for the counters by the driver's stream
memory operations; on the CPU backend a thread waits for the same counters. Steps take the lanes in
turn, so that one exchange begins while the one before it ends.

The host takes longer to enqueue slices than some networks take to carry them, so a call that comes
again with the same addresses runs as a CUDA graph (:func:`run_in_slices`).
"""

from __future__ import annotations

import ctypes
import datetime
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from interlace.comm.cpu import cpu_faults
from interlace.comm.groups.carrier import Carrier, Message
from interlace.comm.groups.copies import (
    has_single_queue,
    require_queues,
    stream_waits_for,
    supports_triggers,
)
from interlace.comm.groups.group import Group
from interlace.comm.runtime.deadlines import pauses_of_a_wait
from interlace.errors import BackendError, PeerTimeoutError


class Trigger(NamedTuple):
    """Say when a step's slices may leave.

    Attributes:
        counter: Address of the counter, int32, in this rank's memory.
        value: Smallest value at which the slices are complete.
    """

    counter: int
    value: int


class Step(NamedTuple):
    """Describe one exchange of slices.

    Attributes:
        triggers: Counters that this rank's slices wait for.
        departures: Slices that leave.
        arrivals: Landings of the slices that are awaited; from one peer, in the order in which it
            sends them.
    """

    triggers: tuple[Trigger, ...]
    departures: tuple[Message, ...]
    arrivals: tuple[Message, ...]


class SliceQueue:
    """Exchange slices with ranks of other nodes while a kernel runs that releases them."""

    def __init__(
        self,
        group: Group,
        operator: str,
        steps: Sequence[Step],
        mark: int,
        lanes: int | None = None,
    ) -> None:
        """Create the queue; nothing is enqueued yet. Collective in the group's first call.

        Args:
            group: The group, which spans nodes.
            operator: Name of the calling operator, for errors.
            steps: The exchanges, in the order in which all ranks make them.
            mark: The number that the ranks' agreement returned for the call.
            lanes: Number of the carrier's lanes that steps take in turn, the same on all ranks; by
                default all.

        Raises:
            BackendError: The driver has no stream memory operations, or a rank cannot connect.
        """
        self._group, self._operator, self._steps = group, operator, list(steps)
        self._mark = mark
        if group.backend == "cuda" and not supports_triggers(group.device):
            raise BackendError(
                f"{operator}: slices to other nodes must have a CUDA driver with stream memory "
                "operations; this one has none (see `interlace doctor`). Take impl='unfused'."
            )
        self._network = group.network()
        self._lanes = lanes or self._network.carrier.lanes
        self._thread: SliceThread | None = None
        self._start: torch.cuda.Event | None = None
        self._arrived: list[torch.cuda.Event] = []  # one per step that was enqueued

    def arm(self) -> None:
        """Prepare for the kernel that counts, which the current stream gets next.

        The counters must be zero at this point of the current stream.
        """
        if self._group.backend == "cpu":
            self._thread = SliceThread(
                self._network.carrier, self._steps, self._mark, self._group.deadline_s
            )
            self._thread.start()
            return
        require_queues(self._group, "slices")
        assert self._network.watch is not None
        self._network.watch.begin(self._operator)
        # The side streams wait for this event before they look at the counters, which are zero only
        # from here on.
        self._start = self._group.streams.current().record_event()
        self._arrived = []

    def release(self, steps: int | None = None) -> None:
        """Enqueue the exchanges, after the kernels that count; end with :meth:`join`.

        Args:
            steps: The number of steps that are to be enqueued by now; default: all. The others
                need another call, after the kernels that count for them.

        Raises:
            BackendError: The driver refuses a wait.
        """
        if self._start is None:
            return
        carrier = self._network.carrier
        # The waits come here and not in ``arm``, behind the kernel in every queue of the device: a
        # wait in front of its kernel would hold the kernel back for ever. For the same reason each
        # comes behind the waits and exchanges of the steps before it, whose lanes may share a
        # queue with its own.
        with self._group.on_device():
            for step in self._steps[len(self._arrived) : steps]:
                lane = len(self._arrived) % self._lanes
                side = self._group.streams.side(True, lane)
                side.wait_event(self._start)
                with torch.cuda.stream(side):
                    for trigger in step.triggers:
                        stream_waits_for(trigger.counter, trigger.value, side)
                    if step.departures or step.arrivals:
                        works = carrier.exchange(step.departures, step.arrivals, lane=lane)
                        for _, work in works:
                            work.wait()
                    self._arrived.append(side.record_event())

    def wait(self, number: int) -> None:
        """Make the current stream wait for the slices up to a step; the CPU backend waits itself.

        Args:
            number: The step, which was released.

        Raises:
            PeerTimeoutError: As of :meth:`join`.
        """
        if self._start is not None:
            self._await(number + 1)
        if self._thread is not None:
            self._thread.await_step(number)
            self._require_arrivals(self._thread)

    def _await(self, steps: int) -> None:
        """Make the current stream wait for the first ``steps`` steps, which were released."""
        current = self._group.streams.current()
        # Each lane's last exchange ends behind its others.
        for event in self._arrived[:steps][-self._lanes :]:
            current.wait_event(event)

    def join(self) -> None:
        """Make the current stream wait for all slices; the CPU backend waits itself.

        Raises:
            PeerTimeoutError: On the CPU backend, a peer's slice did not come in time. On CUDA the
                group's watch finds that out; the next call raises.
        """
        if self._start is not None:
            self._await(len(self._arrived))
            # The call ends for the watch only behind the wait, so that it watches until all slices
            # are here.
            assert self._network.watch is not None
            self._network.watch.end()
            self._start = None
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.join()
            for message in thread.sent:
                self._group.traffic.count_put(message.peer, message.data.nbytes)
            self._require_arrivals(thread)

    def _require_arrivals(self, thread: SliceThread) -> None:
        """Raise the error of a slice that did not come, if there is one."""
        if thread.failure is not None:
            raise self._late(*thread.failure)

    def disarm(self) -> None:
        """Cancel the exchanges, as no kernel will count."""
        if self._thread is not None:
            self._thread.cancelled = True
            self._thread.join()
        # Otherwise the watch would take the cancelled call for a late one.
        if self._start is not None and self._network.watch is not None:
            self._network.watch.end()
        self._thread = self._start = None

    def _late(self, peer: int, step: int, error: BaseException) -> PeerTimeoutError:
        """Break the group and return the error that names the rank that was late first.

        Raises:
            PeerTimeoutError: A kernel has found out before, and knows better.
        """
        self._group.check()
        self._group.channel.declare_late(self._operator, peer, step + 1)
        try:
            self._group.check()
        except PeerTimeoutError as late:
            late.__cause__ = error
            return late
        raise AssertionError("a broken group raises")


def run_in_slices(
    group: Group,
    operator: str,
    key: tuple[Hashable, ...] | None,
    enqueue: Callable[[], None],
    copied: Sequence[torch.Tensor],
) -> None:
    """Enqueue a call that exchanges slices; one that comes again, as a CUDA graph.

    Collective in the group's first call.

    Args:
        operator: Name of the calling operator, for errors.
        key: Everything that the work depends on; see :meth:`Replays.run`. None for no graph.
        enqueue: Enqueues all of it, within ``Group.running``.
        copied: The memory that slices leave from and arrive in.
    """
    watch = group.network().watch
    if watch is not None:
        watch.operator = operator  # which a graph does not say
    with group.running():
        if key is None or has_single_queue():  # with which no graph may have slices
            enqueue()
        else:
            # NCCL registers what a graph sends where the program asks for that.
            group.replays.run((operator, "in slices", *key), enqueue, copied=copied)


class SliceThread(threading.Thread):
    """Exchange slices in a thread, as the CPU backend's network.

    Attributes:
        steps: The exchanges.
        cancelled: Set to end the thread as no kernel will count.
        failure: Peer and step of the first transfer that failed, and its error; None without one.
        sent: Messages that were sent.
    """

    def __init__(
        self, carrier: Carrier, steps: Sequence[Step], mark: int, deadline_s: float
    ) -> None:
        super().__init__(name="interlace slices", daemon=True)
        self._carrier, self.steps, self._mark = carrier, steps, mark
        self._deadline_s = deadline_s
        self.cancelled = False
        self.failure: tuple[int, int, BaseException] | None = None
        self.sent: list[Message] = []
        # Set for each step that has ended; for all steps once the thread ends.
        self._arrived = [threading.Event() for _ in steps]

    def run(self) -> None:
        """Exchange one step after another until all are done, one fails, or no kernel counts."""
        try:
            for number, step in enumerate(self.steps):
                pauses = pauses_of_a_wait()
                while not all(has_reached(trigger) for trigger in step.triggers):
                    if self.cancelled:
                        return
                    time.sleep(next(pauses))
                if not self.exchange(number, step):
                    return
                self._arrived[number].set()
        finally:
            for event in self._arrived:
                event.set()

    def await_step(self, number: int) -> None:
        """Wait until the exchange of a step has ended, or will never."""
        self._arrived[number].wait()

    def exchange(self, number: int, step: Step) -> bool:
        """Exchange the slices of a step; return whether all have arrived in time."""
        end = time.monotonic() + self._deadline_s
        peer = -1
        try:
            # Messages of another call have another tag: they stay where they are.
            tag = self._mark >> 24
            works = []
            # One by one: where a connection has broken, asking for a message fails at once.
            for message in step.arrivals:
                peer = message.peer
                works.extend(self._carrier.exchange((), (message,), tag))
            for message in step.departures:
                peer = message.peer

                def send(message: Message = message) -> None:
                    works.extend(self._carrier.exchange((message,), (), tag))

                # As a message of a network: late, or never, if such faults are injected.
                cpu_faults.deliver(send, ordered=True)
                self.sent.append(message)
            for late_peer, work in works:
                peer = late_peer
                left_s = max(0.001, end - time.monotonic())
                work.wait(datetime.timedelta(seconds=left_s))
        except Exception as error:  # Gloo raises a RuntimeError for what is late or closed
            self.failure = peer, number, error
            return False
        return True


def has_reached(trigger: Trigger) -> bool:
    """Return whether a counter of the CPU backend has reached its value."""
    return bool(ctypes.c_int32.from_address(trigger.counter).value >= trigger.value)


__all__ = [
    "Message",
    "SliceQueue",
    "SliceThread",
    "Step",
    "Trigger",
    "has_reached",
    "run_in_slices",
]
