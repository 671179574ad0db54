"""Say in words where a trace's time went, who waited for whom, and how links were used."""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from interlace.tracing.account import account
from interlace.tracing.events import Launch
from interlace.tracing.libraries import Activity
from interlace.tracing.work import ACTIVITIES, Place, Span, Work, causes_of
from interlace.units import format_bytes, format_ns

_MUCH = 1.5
"""How many times as long ranks must have waited for one than for any other, to call it slow."""


def summary(
    launches: Sequence[Sequence[Launch]],
    work: Work,
    others: Sequence[Sequence[Activity]] = (),
    *,
    is_timed: bool,
) -> str:
    """Return the summary of a trace.

    Args:
        launches: The launches of each rank.
        work: What they did.
        others: What ran beside them on each rank.
        is_timed: Whether times mean something; on the CPU backend only the order of events does.
    """
    spent = account(work, others)
    whole = list(spent.lines()) if spent is not None and is_timed else []
    if not work.spans:
        return "\n".join(["No kernel has recorded an event.", *whole])
    lines = [*_counts(launches, work)]
    if is_timed:
        lines += [*whole, *_shares(work), *_links(work), *_path(work), *_slowest(work)]
    else:
        lines.append("Times are those of Triton's interpreter: only the order of events counts.")
    return "\n".join(lines)


def _counts(launches: Sequence[Sequence[Launch]], work: Work) -> Iterator[str]:
    names = list(dict.fromkeys(launch.name for of_rank in launches for launch in of_rank))
    yield (
        f"{len(launches)} ranks, {max(map(len, launches))} launches each of {', '.join(names)}: "
        f"{len(work.puts)} puts, {len(work.waits)} waits, {len(work.flows)} arrivals"
    )
    lost = sum(launch.lost for of_rank in launches for launch in of_rank)
    if lost:
        yield f"{lost} events were lost, as programs recorded more than their rings hold."


def _shares(work: Work) -> Iterator[str]:
    """Yield, for each rank, the shares of its programs' time."""
    total: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in work.spans:
        total[span.place.rank][span.activity] += span.duration_ns
    for rank, by_activity in sorted(total.items()):
        total_ns = sum(by_activity.values())
        shares = ", ".join(
            f"{activity} {by_activity[activity] / total_ns:.0%}" for activity in ACTIVITIES
        )
        yield f"rank {rank}: {shares}"


def _links(work: Work) -> Iterator[str]:
    """Yield the bytes and the mean rate of each link over the whole trace."""
    duration_ns = max(span.end_ns for span in work.spans) - min(
        span.start_ns for span in work.spans
    )
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for put in work.puts:
        sent[put.place.rank, put.peer] += put.nbytes
    for (source, target), nbytes in sorted(sent.items()):
        rate = f", {nbytes / duration_ns:.3g} GB/s" if duration_ns else ""
        yield f"link {source} to {target}: {format_bytes(nbytes)}{rate}"


def _path(work: Work) -> Iterator[str]:
    """Yield what the critical path consists of, and its longest steps."""
    steps = critical_path(work)
    total_ns = sum(step.duration_ns for step in steps)
    if not total_ns:
        return
    shares: dict[str, float] = defaultdict(float)
    for step in steps:
        shares[step.activity] += step.duration_ns
    parts = sorted(shares.items(), key=lambda part: -part[1])
    text = ", ".join(f"{activity} {duration / total_ns:.0%}" for activity, duration in parts)
    yield f"critical path, {format_ns(total_ns)}: {text}"
    for step in sorted(steps, key=lambda step: -step.duration_ns)[:3]:
        yield f"  {_words(step)}"


def _words(step: PathStep) -> str:
    number = "" if step.number < 0 else f" {step.number}"
    program = f"rank {step.place.rank}, program {step.place.program}"
    return f"{format_ns(step.duration_ns)}: {step.activity}{number} ({program})"


def _slowest(work: Work) -> Iterator[str]:
    """Yield which rank the others have waited for most, and in what it differs from them."""
    waited: dict[int, float] = defaultdict(float)
    last_departure: dict[tuple[object, float], tuple[float, int]] = {}
    for flow in work.flows:
        if flow.source.rank != flow.target.rank:
            key = (flow.target, flow.arrival_ns)
            cause = (flow.departure_ns, flow.source.rank)
            last_departure[key] = max(last_departure.get(key, cause), cause)
    for wait in work.waits:
        cause = last_departure.get((wait.place, wait.end_ns), (0.0, -1))
        if cause[0] > wait.start_ns:  # else the rank had sent before
            waited[cause[1]] += cause[0] - wait.start_ns
    if not waited:
        return
    ranks = sorted(waited, key=lambda rank: -waited[rank])
    times = ", ".join(f"rank {rank} {format_ns(waited[rank])}" for rank in ranks)
    yield f"programs have waited, in sum, for what another rank had not sent yet: {times}"
    slowest, *faster = ranks
    if faster and waited[slowest] < _MUCH * waited[faster[0]]:
        return
    yield f"slowest: rank {slowest}"
    firsts: dict[int, float] = {}
    tiles: dict[int, list[float]] = defaultdict(list)
    for span in work.spans:
        rank = span.place.rank
        firsts[rank] = min(firsts.get(rank, span.start_ns), span.start_ns)
        if span.activity == "compute":
            tiles[rank].append(span.duration_ns)
    others = [time for rank, time in firsts.items() if rank != slowest]
    if others:
        late_ns = firsts[slowest] - statistics.median(others)
        when = "later" if late_ns > 0 else "earlier"
        # Simulated ranks begin together.
        yield (
            f"  it began {format_ns(abs(late_ns))} {when} than the others"
            if round(late_ns)
            else "  it began together with the others"
        )
    medians = {rank: statistics.median(times) for rank, times in tiles.items()}
    if slowest in medians and len(medians) > 1:
        median = statistics.median(medians[rank] for rank in medians if rank != slowest)
        yield (
            f"  a tile takes it {format_ns(medians[slowest])}, and the others {format_ns(median)}"
        )


# The critical path: what the time from the first event to the last was spent on


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
    causes = causes_of(work)
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
        cause = causes.get((place, span.end_ns)) if span.activity == "wait" else None
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
