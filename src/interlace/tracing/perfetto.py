"""Traces for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``.

A rank is a process, in which each program has a row, with one more for the launches and one for
each stream of libraries and copies. Links are a process, too. Arrows lead from a put or a signal to
the wait that it has ended. Times are microseconds from the first event on. A simulated timeline of
the same call has the same processes and rows, under the measured ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from interlace.tracing.events import Launch
from interlace.tracing.libraries import Activity
from interlace.tracing.work import Place, Span, Work, arrivals

_LINKS = 1000  # the process of the links
SIMULATED = 2000  # is added to a process's number if it is simulated
UNTIMED = "order of events only"  # the clock of a document whose times mean nothing else
_LAUNCHES = 1_000_000  # the row of the launches
_STREAMS = 2_000_000  # the rows of other kernels and copies
_PROGRAMS_PER_LAUNCH = 10_000
_SIMULATED_FLOWS = 1 << 30  # the number of the first arrow

Json = dict[str, Any]


class Timeline(NamedTuple):
    """The contents of a document about one call.

    Attributes:
        launches: The launches of each rank.
        work: What they did.
        others: What ran beside them on each rank.
    """

    launches: Sequence[Sequence[Launch]]
    work: Work
    others: Sequence[Sequence[Activity]]


def to_perfetto(measured: Timeline | None, facts: Json, simulated: Timeline | None = None) -> Json:
    """Return a trace in Chrome's format.

    Args:
        measured: What was recorded; None if there is only a simulation.
        facts: What to say about the trace itself.
        simulated: The simulated timeline of the same call, drawn under the measured one.
    """
    events: list[Json] = []
    if measured is not None:
        events += _events(measured)
    if simulated is not None:
        for event in _events(simulated):
            event["pid"] += SIMULATED
            if event["ph"] in ("s", "f"):
                event["id"] += _SIMULATED_FLOWS
            if event["name"] == "process_name":
                event["args"] = {"name": f"simulated {event['args']['name']}"}
            events.append(event)
    pids = {event["pid"] for event in events}
    # Without an index, Perfetto sorts processes by their first events.
    order = [_name("process_sort_index", pid, 0, pid, "sort_index") for pid in sorted(pids)]
    return {"traceEvents": [*order, *events], "displayTimeUnit": "ns", "otherData": facts}


def _events(timeline: Timeline) -> Iterator[Json]:
    launches, work, others = timeline
    yield from _names(launches, work, len(others))
    yield from _launches(launches)
    yield from _others(others)
    yield from map(_bar, work.spans)
    yield from _points(launches)
    yield from _flows(work)
    yield from _links(work)
    yield from _waiting(work)


def row_of(place: Place) -> int:
    """Return the number of a program's row; each launch has rows of its own."""
    return place.launch * _PROGRAMS_PER_LAUNCH + place.program


def _names(launches: Sequence[Sequence[Launch]], work: Work, ranks: int) -> Iterator[Json]:
    sms = {span.place: span.sm for span in work.spans}
    for rank in range(len(launches), ranks):
        yield _name("process_name", rank, 0, f"rank {rank}")
    for rank, of_rank in enumerate(launches):
        yield _name("process_name", rank, 0, f"rank {rank}")
        for number, launch in enumerate(of_rank):
            for program in launch.programs:
                place = Place(rank, number, program)
                text = f"{launch.name} {number}, program {program}, SM {sms.get(place, 0)}"
                yield _name("thread_name", rank, row_of(place), text)
    if work.puts:
        yield _name("process_name", _LINKS, 0, "links")
        for source, target in sorted({(put.place.rank, put.peer) for put in work.puts}):
            yield _name("thread_name", _LINKS, _link(source, target), f"{source} to {target}")


def _name(kind: str, pid: int, tid: int, value: str | int, argument: str = "name") -> Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {argument: value}}


def _link(source: int, target: int) -> int:
    return source * 100 + target


def _launches(launches: Sequence[Sequence[Launch]]) -> Iterator[Json]:
    """Yield a bar for each launch, from its first event to its last.

    Launches on several streams may overlap, and bars of one row must not.
    """
    for rank, of_rank in enumerate(launches):
        ends: list[float] = []
        timed = []
        for number, launch in enumerate(of_rank):
            times = [event.time_ns for events in launch.programs.values() for event in events]
            if times:
                timed.append((min(times), max(times), number, launch))
        for start, end, number, launch in sorted(timed, key=lambda each: each[:3]):
            free = next((row for row, until in enumerate(ends) if until <= start), len(ends))
            if free == len(ends):
                ends.append(end)
                yield _name("thread_name", rank, _LAUNCHES + free, "launches")
            ends[free] = end
            arguments = {"launch": number, "programs": len(launch.programs)}
            yield {
                "ph": "X", "name": launch.name, "cat": "launch", "pid": rank,
                "tid": _LAUNCHES + free, "ts": start / 1000, "dur": (end - start) / 1000,
                "args": arguments,
            }  # fmt: skip


def _others(others: Sequence[Sequence[Activity]]) -> Iterator[Json]:
    """Yield a row for each stream, and a bar for each kernel and copy of others."""
    for rank, of_rank in enumerate(others):
        for stream in sorted({activity.stream for activity in of_rank}):
            yield _name("thread_name", rank, _STREAMS + stream, f"stream {stream}")
        for activity in of_rank:
            yield {
                "ph": "X", "name": activity.name, "cat": activity.kind, "pid": rank,
                "tid": _STREAMS + activity.stream, "ts": activity.start_ns / 1000,
                "dur": activity.duration_ns / 1000, "args": {},
            }  # fmt: skip


def _bar(span: Span) -> Json:
    number = "" if span.number < 0 else f" {span.number}"
    return {
        "ph": "X",
        "name": f"{span.activity}{number}",
        "cat": span.activity,
        "pid": span.place.rank,
        "tid": row_of(span.place),
        "ts": span.start_ns / 1000,
        "dur": span.duration_ns / 1000,
        "args": {"sm": span.sm},
    }


def _points(launches: Sequence[Sequence[Launch]]) -> Iterator[Json]:
    """Yield the events without a length: puts, signals and a kernel's own marks."""
    for rank, of_rank in enumerate(launches):
        for number, launch in enumerate(of_rank):
            for program, events in launch.programs.items():
                row = row_of(Place(rank, number, program))
                for event in events:
                    if event.kind == "mark":
                        name = f"mark {event.number}"
                    elif event.kind in ("put", "signal") and (event.peer >= 0 or event.has_several):
                        to = "several ranks" if event.has_several else f"rank {event.peer}"
                        name = f"{event.kind} to {to}"
                    else:
                        continue
                    yield {
                        "ph": "i", "s": "t", "name": name, "cat": event.kind, "pid": rank,
                        "tid": row, "ts": event.time_ns / 1000, "args": {"number": event.number},
                    }  # fmt: skip


def _flows(work: Work) -> Iterator[Json]:
    for number, flow in enumerate(work.flows):
        arrow = {"name": "arrives", "cat": "flow", "id": number}
        # An arrow leads between the bars that enclose its ends. A put is the end of one bar, and
        # the beginning of the next, so ends are drawn a nanosecond before.
        departure = max(flow.departure_ns - 1, 0.0)
        arrival = max(flow.arrival_ns - 1, departure)
        for phase, place, time_ns in (
            ({"ph": "s"}, flow.source, departure),
            ({"ph": "f", "bp": "e"}, flow.target, arrival),
        ):
            yield {
                **phase, **arrow, "pid": place.rank, "tid": row_of(place), "ts": time_ns / 1000
            }  # fmt: skip


def _links(work: Work) -> Iterator[Json]:
    """Yield a point for each put on the row of its link, and the bytes in flight."""
    arrived = arrivals(work)
    changes: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for put in work.puts:
        link = put.place.rank, put.peer
        yield {
            "ph": "i", "s": "t", "name": f"{put.nbytes} bytes", "cat": "put", "pid": _LINKS,
            "tid": _link(*link), "ts": put.time_ns / 1000,
            "args": {"bytes": put.nbytes, "tile": put.tile, "program": put.place.program},
        }  # fmt: skip
        if put in arrived:
            changes[link] += [(put.time_ns, put.nbytes), (arrived[put], -put.nbytes)]
    for (source, target), of_link in changes.items():
        name = f"{source} to {target}: bytes in flight"
        yield from _counter(_LINKS, name, "bytes", of_link)


def _waiting(work: Work) -> Iterator[Json]:
    """Yield how many programs of each rank wait."""
    changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for wait in work.waits:
        if wait.end_ns > wait.start_ns:
            changes[wait.place.rank] += [(wait.start_ns, 1), (wait.end_ns, -1)]
    for rank, of_rank in changes.items():
        yield from _counter(rank, "programs that wait", "programs", of_rank)


def _counter(pid: int, name: str, unit: str, changes: list[tuple[float, int]]) -> Iterator[Json]:
    value = 0
    for time_ns, change in sorted(changes):
        value += change
        yield {
            "ph": "C", "name": name, "pid": pid, "tid": 0, "ts": time_ns / 1000,
            "args": {unit: value},
        }  # fmt: skip
