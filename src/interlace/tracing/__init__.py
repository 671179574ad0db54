"""Timelines from inside the kernels: what each program of each rank did, and when.

``interlace.trace()`` records; docs/tracing.md says what a trace shows.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from interlace.comm import group_of
from interlace.comm import recording as recordings
from interlace.errors import ArgumentError
from interlace.tracing import clocks, libraries
from interlace.tracing.clocks import Clock
from interlace.tracing.events import Event, Launch, Packed, first_times, pack, timer_step_ns, unpack
from interlace.tracing.libraries import Activity
from interlace.tracing.perfetto import Json, to_perfetto
from interlace.tracing.summary import summary
from interlace.tracing.work import Flow, Place, Sent, Span, Wait, Work, work_of

__all__ = [
    "Activity",
    "Clock",
    "Event",
    "Flow",
    "Launch",
    "Place",
    "Sent",
    "Span",
    "Trace",
    "Wait",
    "Work",
    "trace",
]


_STORE_NS = 200.0  # between a store and the record of it, at most


class Trace:
    """The events of a trace, of all ranks; known once the context of :func:`trace` has ended.

    Attributes:
        clocks: The clock of each rank, as all times are those of rank 0's.
        is_timed: Whether times mean something. On the CPU backend only the order of events does.
        timer_step_ns: Resolution of the timer of this rank's device.
        unrecorded: Launches of this rank for which there was no memory for events.
        others: What ran on each rank's GPU beside the kernels that record events: products of
            cuBLAS, collectives of NCCL, copies.
    """

    def __init__(self) -> None:
        self.clocks: list[Clock] = []
        self.is_timed = False
        self.timer_step_ns = 0
        self.unrecorded = 0
        self.others: list[list[Activity]] = []
        self._launches: list[list[Launch]] | None = None

    @property
    def launches(self) -> list[list[Launch]]:
        """The launches of each rank, in the order in which they were enqueued.

        Raises:
            ArgumentError: The context of the trace has not ended.
        """
        if self._launches is None:
            raise ArgumentError(
                "a trace must have ended before it is read. Read it after the `with` block."
            )
        return self._launches

    @functools.cached_property
    def work(self) -> Work:
        """What programs did with their time, their puts and waits, and which put ended which."""
        error_ns = max((clock.error_ns for clock in self.clocks), default=0.0)
        return work_of(self.launches, 2 * error_ns + _STORE_NS if self.is_timed else 0.0)

    def summary(self) -> str:
        """Return in words where the time went.

        The lines say how much longer than its product the call took, and why; for each rank, the
        shares of its programs' time in compute, puts and waits; for each link, its bytes and their
        mean rate; what the critical path consists of; and which rank the others waited for.
        """
        text = summary(self.launches, self.work, self.others, is_timed=self.is_timed)
        if self.unrecorded:
            text += f"\n{self.unrecorded} launches of this rank had no memory left to record."
        return text

    def to_perfetto(self) -> Json:
        """Return the trace in the format of Perfetto and ``chrome://tracing``."""
        facts = {
            "clock": "device" if self.is_timed else "order of events only",
            "clock_offsets_ns": [clock.offset_ns for clock in self.clocks],
            "timer_step_ns": self.timer_step_ns,
            "clock_errors_ns": [clock.error_ns for clock in self.clocks],
        }
        return to_perfetto(self.launches, self.work, self.others, facts)

    def save(self, path: str | Path) -> None:
        """Write the trace to a JSON file, which https://ui.perfetto.dev opens."""
        Path(path).write_text(json.dumps(self.to_perfetto()), encoding="utf-8")


@contextlib.contextmanager
def trace(group: dist.ProcessGroup | None = None) -> Iterator[Trace]:
    """Record when the programs of every kernel of a group compute, put, signal and wait.

    Collective: every rank of the group enters the context, makes the same calls, and leaves it.
    Kernels are compiled once more for it, at their first call in a trace, so trace a call twice and
    look at the second one. Calls are not replayed from CUDA graphs meanwhile, and what a program
    captures itself is not recorded.

    Args:
        group: A process group; the default one if None.

    Yields:
        A :class:`Trace`, to be read after the context.

    Raises:
        ArgumentError: This process is in a trace already.
        GroupError: The group's ranks are on several nodes.

    Example:
        >>> with interlace.trace() as trace:
        ...     y = interlace.gemm_reduce_scatter(x, w)
        >>> print(trace.summary())
        >>> if rank == 0:
        ...     trace.save("trace.json")
    """
    if recordings.active() is not None:
        raise ArgumentError("a trace must not begin within another one. Leave the first one first.")
    owner = group_of(group)
    # Clocks are compared through memory that all ranks reach.
    owner.require_one_node("trace")
    made = Trace()
    with (
        libraries.observed(owner) as activities,
        recordings.recording(owner.health, owner.device) as recording,
    ):
        owner.synchronize()  # what the recording has zeroed is zero on all streams
        yield made
        owner.synchronize()
    made.unrecorded = recording.unrecorded
    made.clocks = clocks.compare(owner)
    made.is_timed = owner.backend == "cuda"
    packed = pack(recording.launches)
    made.timer_step_ns = timer_step_ns(packed)
    others = libraries.beside(activities, first_times(recording.launches)) if activities else []
    own = Packed(
        packed,
        owner.memory.heap.base,
        made.clocks[owner.rank].offset_ns,
        [list(activity) for activity in others],
    )
    made._launches, made.others = unpack(
        [Packed(*values) for values in owner.exchange("end of a trace", list(own))]
    )
