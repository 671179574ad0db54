"""Timelines from inside the kernels: what each program of each rank did, and when.

``interlace.trace()`` records; docs/tracing.md says what a trace shows.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from interlace.comm import group_of
from interlace.comm.cpu import cpu_faults
from interlace.comm.replay import recording as recordings
from interlace.documents import to_json
from interlace.errors import ArgumentError
from interlace.tracing import clocks, libraries
from interlace.tracing.account import PHASES, Account, account
from interlace.tracing.clocks import Clock
from interlace.tracing.events import Event, Launch, Packed, first_times, pack, timer_step_ns, unpack
from interlace.tracing.libraries import Activity
from interlace.tracing.perfetto import UNTIMED, Json, Timeline, to_perfetto
from interlace.tracing.summary import summary
from interlace.tracing.work import Flow, Place, Sent, Span, Wait, Work, work_of

__all__ = [
    "PHASES",
    "Account",
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
    "simulated_document",
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

    def __init__(
        self,
        launches: list[list[Launch]] | None = None,
        others: list[list[Activity]] | None = None,
    ) -> None:
        """Hold events, such as a simulator's; those of a trace that is recorded come later."""
        self.clocks: list[Clock] = []
        self.is_timed = launches is not None
        self.timer_step_ns = 0
        self.unrecorded = 0
        self.others: list[list[Activity]] = others or []
        self._launches = launches

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
        """Each program's use of time, its puts and waits, and which put ended which wait."""
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

    @functools.cached_property
    def account(self) -> Account | None:
        """The time of the rank that ends last, by cause; None if times mean nothing."""
        return account(self.work, self.others) if self.is_timed else None

    def finding(self) -> str:
        """Return in one line why the call takes longer than its product; without times, how many
        puts left while tiles were still computed.
        """
        if self.account is not None:
            return self.account.finding()
        last: dict[int, float] = {}
        for span in self.work.spans:
            if span.activity == "compute":
                last[span.place.rank] = max(last.get(span.place.rank, 0.0), span.end_ns)
        early = sum(put.time_ns < last.get(put.place.rank, 0.0) for put in self.work.puts)
        return f"{early} of {len(self.work.puts)} puts leave before the last tile is computed"

    def to_perfetto(self, simulated: Trace | None = None, title: str = "") -> Json:
        """Return the trace in the format of Perfetto and ``chrome://tracing``.

        Args:
            simulated: The simulated timeline of the same call, to be drawn under this one.
            title: What was traced, for pictures of it.
        """
        facts = {
            "title": title,
            "finding": self.finding(),
            "clock": "device" if self.is_timed else UNTIMED,
            "clock_offsets_ns": [clock.offset_ns for clock in self.clocks],
            "timer_step_ns": self.timer_step_ns,
            "clock_errors_ns": [clock.error_ns for clock in self.clocks],
        }
        beside = None
        if simulated is not None and simulated.account is not None:
            facts["simulated_finding"] = simulated.finding()
            beside = simulated._timeline()
        return to_perfetto(self._timeline(), facts, beside)

    def _timeline(self) -> Timeline:
        return Timeline(self.launches, self.work, self.others)

    def save(self, path: str | Path, simulated: Trace | None = None) -> None:
        """Write the trace to a JSON file, which https://ui.perfetto.dev opens.

        Args:
            path: The file.
            simulated: As :meth:`to_perfetto` takes it.
        """
        text = to_json(self.to_perfetto(simulated), indent=None)
        Path(path).write_text(text, encoding="utf-8")


def simulated_document(simulated: Trace, title: str = "") -> Json:
    """Return a simulated timeline alone in the format of Perfetto."""
    facts = {"title": title, "simulated_finding": simulated.finding(), "clock": "simulated"}
    return to_perfetto(None, facts, simulated._timeline())


@contextlib.contextmanager
def trace(group: dist.ProcessGroup | None = None, *, hold_s: float = 0.0) -> Iterator[Trace]:
    """Record when the programs of every kernel of a group compute, put, signal and wait.

    Collective: every rank of the group enters the context, makes the same calls, and leaves it.
    Kernels are compiled once more for it, at their first call in a trace, so trace a call twice and
    look at the second one. Calls are not replayed from CUDA graphs meanwhile, and what a program
    captures itself is not recorded.

    Hosts enqueue calls at times of their own, so a short call waits for the rank whose host is
    last. ``hold_s`` keeps the calls back on the current stream until all hosts have enqueued them.

    Args:
        group: A process group; the default one if None.
        hold_s: Seconds that pass before what is enqueued begins, on all ranks at once; 0 holds
            nothing back. It should be longer than a host takes to enqueue the calls.

    Yields:
        A :class:`Trace`, to be read after the context.

    Raises:
        ArgumentError: This process is in a trace already or explores a program, or ``hold_s`` is
            negative.
        GroupError: The group's ranks are on several nodes.

    Example:
        >>> with interlace.trace() as trace:
        ...     y = interlace.gemm_reduce_scatter(x, w)
        >>> print(trace.summary())
        >>> if rank == 0:
        ...     trace.save("trace.json")
    """
    if cpu_faults.world() is not None:
        raise ArgumentError(
            "a trace must begin outside of interlace_explorer.explore, where times mean nothing "
            "and all ranks share a process; got inside."
        )
    if recordings.active() is not None:
        raise ArgumentError("a trace must not begin within another one. Leave the first one first.")
    if not (isinstance(hold_s, numbers.Real) and 0 <= hold_s < math.inf):
        raise ArgumentError(f"hold_s must be a number of seconds, at least 0; got {hold_s!r}.")
    owner = group_of(group)
    # Clocks are compared through memory that all ranks reach.
    owner.require_one_node("trace")
    made = Trace()
    with libraries.observed(owner) as activities:
        if hold_s:
            clocks.begin_together(owner, hold_s)
        with recordings.recording(owner.health) as recording:
            yield made
    owner.synchronize()
    made.unrecorded = recording.unrecorded
    made.clocks = clocks.compare(owner)
    made.is_timed = owner.backend == "cuda"
    packed = pack(recording.launches)
    made.timer_step_ns = timer_step_ns(packed)
    library_activities = (
        libraries.beside(activities, first_times(recording.launches)) if activities else []
    )
    own = Packed(
        packed,
        owner.memory.heap.base,
        made.clocks[owner.rank].offset_ns,
        [list(activity) for activity in library_activities],
    )
    made._launches, made.others = unpack(
        [Packed(*values) for values in owner.exchange("end of a trace", list(own))]
    )
