"""The outcome of a sub-layer: its parts on one time axis, and where their time goes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from interlace_sim.results import LinkUse, Result, Span, TaskTime
from interlace_sim.t3.collectives import Collective
from interlace_sim.t3.gpu import BytesBy, Part
from interlace_sim.t3.memory import Kind
from interlace_sim.t3.product import Product

Event = TypeVar("Event", Span, LinkUse)

Schedule = list[tuple[int, Part]]
"""Parts with their start times in nanoseconds."""


@dataclasses.dataclass(frozen=True)
class SubLayer:
    """Outcome of one configuration, on GPU 0.

    Attributes:
        result: Times, rows, link uses and the physical bound, in the form of every simulation.
        memory_bytes: Bytes of DRAM traffic by (cause, kind): causes ``product``,
            ``reduce_scatter``, ``all_gather``, ``all_to_all``, ``tracker``; kinds ``read``,
            ``write``, ``update``.
        parts: Simulated parts in the order of their starts.
        overlapped_ns: Nanoseconds that links worked while the product ran.
        spent_ns: Where the time goes, ``total_ns`` in all: the mean compute unit's time by
            :data:`~interlace_sim.t3.gpu.Cause` while the product runs, and what each collective
            adds before or after it.
    """

    configuration: str
    collective: Collective
    product: Product
    result: Result
    memory_bytes: BytesBy
    parts: tuple[Part, ...]
    overlapped_ns: int
    spent_ns: dict[str, float]

    @property
    def total_ns(self) -> int:
        return self.result.total_ns

    @property
    def starts_ns(self) -> list[int]:
        """Starts of the parts, in nanoseconds."""
        return [task.start_ns for task in self.result.tasks]

    @property
    def fused(self) -> Part:
        """The part that contains the product."""
        return next(part for part in self.parts if part.product_ns)

    def moved(self, cause: str, *kinds: Kind) -> float:
        """Return the bytes of DRAM traffic of a cause, of all kinds unless some are named."""
        return sum(
            size
            for (owner, kind), size in self.memory_bytes.items()
            if owner == cause and (not kinds or kind in kinds)
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything but single spans, for JSON."""
        part = self.fused
        return {
            "configuration": self.configuration,
            "collective": self.collective,
            "product": dataclasses.asdict(self.product),
            **self.result.to_json(),
            "memory_bytes": {
                f"{cause} {kind}": round(size)
                for (cause, kind), size in sorted(self.memory_bytes.items())
            },
            "parts": {part.name: part.time_ns for part in self.parts},
            "overlapped_ns": self.overlapped_ns,
            "spent_ns": {cause: round(time) for cause, time in self.spent_ns.items()},
            "queue_entries": max(part.queue_entries for part in self.parts),
            "mean_queue_entries": part.mean_queue_entries,
            "row_misses": part.row_misses,
            "communication_waited_ns": part.waited_ns,
            "tracker_entries": part.tracker_entries,
            "tracker_overflows": part.tracker_overflows,
            "threshold": part.threshold if part.threshold != float("inf") else None,
        }


def spent(schedule: Schedule, collective: Collective) -> dict[str, float]:
    """Divide the time of a schedule by cause: the product's first, then what others add to it."""
    began, product = next(entry for entry in schedule if entry[1].product_ns)
    times: dict[str, float] = dict(product.unit_ns.items())
    # Time before the product is that of an input that is gathered first.
    if began:
        times[collective] = began
    covered = began + product.product_ns
    for start, part in sorted(schedule, key=lambda entry: entry[0] + entry[1].time_ns):
        end = start + part.time_ns
        if end > covered:
            # A fused part goes on with its collective when its product has ended.
            name = collective if part is product else part.name
            times[name] = times.get(name, 0.0) + end - covered
            covered = end
    return times


def tasks(schedule: Schedule) -> list[TaskTime]:
    """Return the parts as tasks, each of which follows the one before it."""
    return [
        TaskTime(
            part.name,
            part.spans[0].row,
            start,
            start + part.time_ns,
            None if start == 0 else schedule[number - 1][1].name,
        )
        for number, (start, part) in enumerate(schedule)
    ]


def moved_by(event: Event, start: int) -> Event:
    """Return an event of a part that begins at ``start`` on the sub-layer's time axis."""
    if not start:
        return event
    return dataclasses.replace(event, start_ns=event.start_ns + start, end_ns=event.end_ns + start)
