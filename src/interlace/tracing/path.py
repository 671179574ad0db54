"""The critical path of a trace: what the time from its first event to its last was spent on."""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict

from interlace.tracing.work import Flow, Place, Span, Work


@dataclasses.dataclass(frozen=True)
class PathStep:
    """A stretch of the critical path.

    Attributes:
        place: The program that it is spent in.
        activity: As of a span; ``"in flight"`` between a put or a signal and the end of the wait
            for it; ``"between launches"``.
        start_ns, end_ns: Time on the clock of rank 0.
        number: The tile or the slice; -1 if unknown.
    """

    place: Place
    activity: str
    start_ns: float
    end_ns: float
    number: int = -1

    @property
    def duration_ns(self) -> float:
        """Return how long it took."""
        return self.end_ns - self.start_ns


def critical_path(work: Work) -> list[PathStep]:
    """Return the steps that led to the last event, the earliest first.

    It is followed backwards: from a wait to the last put or signal that the wait was for, from any
    other span to the one before it in the same program, and from the beginning of a program to the
    program of the same rank that ended last before.
    """
    by_place: dict[Place, list[Span]] = defaultdict(list)
    for span in work.spans:
        by_place[span.place].append(span)
    if not by_place:
        return []
    ends = {place: [span.end_ns for span in spans] for place, spans in by_place.items()}
    last_flows: dict[tuple[Place, float], Flow] = {}
    for flow in work.flows:
        key = (flow.target, flow.arrival_ns)
        if key not in last_flows or flow.departure_ns > last_flows[key].departure_ns:
            last_flows[key] = flow
    place = max(ends, key=lambda place: ends[place][-1])
    time_ns, steps = ends[place][-1], list[PathStep]()
    while True:
        index = bisect.bisect_right(ends.get(place, []), time_ns) - 1
        if index < 0:
            previous = _ended_before(place, time_ns, ends)
            if previous is None:
                return steps[::-1]
            end_ns = ends[previous][bisect.bisect_right(ends[previous], time_ns) - 1]
            steps.append(PathStep(place, "between launches", end_ns, time_ns))
            place, time_ns = previous, end_ns
            continue
        span = by_place[place][index]
        if span.end_ns < time_ns:  # what came before the last event of a wait's source
            steps.append(PathStep(place, "other", span.end_ns, time_ns))
        cause = last_flows.get((place, span.end_ns)) if span.activity == "wait" else None
        # A put that had left before the wait began has not held it up.
        if cause is not None and span.start_ns < cause.departure_ns < span.end_ns:
            steps.append(PathStep(place, "in flight", cause.departure_ns, span.end_ns, span.number))
            place, time_ns = cause.source, cause.departure_ns
        else:
            steps.append(PathStep(place, span.activity, span.start_ns, span.end_ns, span.number))
            time_ns = span.start_ns


def _ended_before(place: Place, time_ns: float, ends: dict[Place, list[float]]) -> Place | None:
    """Return the program of an earlier launch on the same rank that ended last before a time."""
    earlier = [
        other
        for other in ends
        if other.rank == place.rank and other.launch < place.launch and ends[other][0] <= time_ns
    ]

    def last_end(other: Place) -> float:
        return ends[other][bisect.bisect_right(ends[other], time_ns) - 1]

    return max(earlier, key=last_end, default=None)
