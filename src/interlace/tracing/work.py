"""Find each program's use of its time, and which put or signal ended which wait."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from interlace.tracing.events import Event, Launch

ACTIVITIES = ("compute", "put", "wait", "other")


@dataclasses.dataclass(frozen=True)
class Place:
    """A program of a launch on a rank.

    Attributes:
        launch: Number of the launch, from 0; the same call has the same number on every rank.
    """

    rank: int
    launch: int
    program: int


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of time of one program.

    Attributes:
        place: The program.
        activity: One of :data:`ACTIVITIES`.
        start_ns, end_ns: Time on the clock of rank 0.
        number: The tile that is computed or put, or the slice that is waited for; -1 if unknown.
        sm: Number of the SM.
    """

    place: Place
    activity: str
    start_ns: float
    end_ns: float
    number: int
    sm: int

    @property
    def duration_ns(self) -> float:
        """Return how long it took."""
        return self.end_ns - self.start_ns


@dataclasses.dataclass(frozen=True)
class Sent:
    """One put.

    Attributes:
        place: The program that made it.
        peer: The rank that it went to.
        time_ns: When the store had been issued.
        tile: The tile that the program had last begun to compute; -1 if there was none.
        nbytes: Bytes of the tile, masked elements among them.
    """

    place: Place
    peer: int
    time_ns: float
    tile: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Flow:
    """A put or a signal of one rank, and the wait of another that it has ended.

    Attributes:
        source, target: The programs.
        departure_ns: When the put or the signal had been issued.
        arrival_ns: When the wait was over.
    """

    source: Place
    target: Place
    departure_ns: float
    arrival_ns: float


@dataclasses.dataclass(frozen=True)
class Wait:
    """One wait of one program.

    Attributes:
        place: The program.
        start_ns, end_ns: When it began and was over; they are the same where a deadline expired
            before the event.
        slice: The slice that was awaited.
        signals: (peer, address) of each signal that was awaited; empty for packed words.
    """

    place: Place
    start_ns: float
    end_ns: float
    slice: int
    signals: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """All that the ranks of a trace did."""

    spans: tuple[Span, ...]
    puts: tuple[Sent, ...]
    waits: tuple[Wait, ...]
    flows: tuple[Flow, ...]


def work_of(launches: Sequence[Sequence[Launch]], tolerance_ns: float) -> Work:
    """Return what the programs of all ranks did.

    Args:
        launches: The launches of each rank, in rank order.
        tolerance_ns: By how much a put may seem to leave after it has arrived: the error of the
            clocks, and the time between a store and the record of it.
    """
    spans: list[Span] = []
    puts: list[Sent] = []
    waits: list[Wait] = []
    signals: dict[tuple[int, int, int], list[tuple[float, Place]]] = defaultdict(list)
    ranks = len(launches)
    for place, events in _programs(launches):
        # The first thread records everything; the others add the signals to and from other peers.
        main = [event for event in events if event.lane == 0]
        spans += _spans(place, main)
        puts += _puts(place, main, ranks)
        waits += _waits(place, events)
        for event in events:
            if event.kind == "signal" and event.peer >= 0:
                signals[place.rank, event.peer, event.number].append((event.time_ns, place))
    for departures in signals.values():
        departures.sort(key=lambda departure: departure[0])
    flows = [
        *_flows_of_signals(waits, signals, tolerance_ns),
        *_flows_of_words(waits, puts, tolerance_ns),
    ]
    return Work(tuple(spans), tuple(puts), tuple(waits), tuple(flows))


def _programs(launches: Sequence[Sequence[Launch]]) -> Iterator[tuple[Place, list[Event]]]:
    for rank, of_rank in enumerate(launches):
        for number, launch in enumerate(of_rank):
            for program, events in launch.programs.items():
                yield Place(rank, number, program), events


def _spans(place: Place, events: Sequence[Event]) -> Iterator[Span]:
    """Yield the stretches between a program's events, each named by what it lay between."""
    tile = -1
    for event, following in itertools.pairwise(events):
        if event.kind == "tile":
            tile = event.number
        number = tile
        if event.kind == "wait":
            activity, number = "wait", event.number
        elif event.kind == "tile":
            activity = "compute"
        elif following.kind in ("put", "signal"):
            activity = "put"
        else:
            activity, number = "other", -1
        if following.time_ns > event.time_ns:
            yield Span(place, activity, event.time_ns, following.time_ns, number, event.sm)


def _puts(place: Place, events: Sequence[Event], ranks: int) -> Iterator[Sent]:
    """Yield the puts to other ranks; one to several ranks is shared out evenly over all of them."""
    tile = -1
    for event in events:
        if event.kind == "tile":
            tile = event.number
        if event.kind != "put":
            continue
        peers = range(ranks) if event.has_several else (event.peer,)
        for peer in peers:
            if peer != place.rank:
                nbytes = event.number // len(peers)
                yield Sent(place, peer, event.time_ns, tile, nbytes)


def _waits(place: Place, events: Sequence[Event]) -> Iterator[Wait]:
    """Yield the waits; threads of one wait record their peers at nearly the same time."""
    main = [event for event in events if event.lane == 0]
    begins = [event for event in main if event.kind == "wait"]
    ends = [event for event in main if event.kind in ("arrived", "unpacked")]
    # Where the ring has overwritten the first events, an end may have lost its beginning.
    begins = begins[max(0, len(begins) - len(ends)) :]
    ends = ends[max(0, len(ends) - len(begins)) :]
    times = [end.time_ns for end in ends]
    signals: list[list[tuple[int, int]]] = [[] for _ in ends]
    for event in events:
        if event.kind != "arrived" or event.peer < 0 or not times:
            continue
        after = bisect.bisect_left(times, event.time_ns)
        nearby = [i for i in (after - 1, after) if 0 <= i < len(times)]
        nearest = min(nearby, key=lambda i: abs(times[i] - event.time_ns))
        signals[nearest].append((event.peer, event.number))
    for begin, end, awaited in zip(begins, ends, signals, strict=True):
        yield Wait(place, begin.time_ns, end.time_ns, begin.number, tuple(awaited))


def _flows_of_signals(
    waits: Sequence[Wait],
    signals: dict[tuple[int, int, int], list[tuple[float, Place]]],
    tolerance_ns: float,
) -> Iterator[Flow]:
    """Yield, for each signal that was awaited, the last time that it was set before."""
    for wait in waits:
        for peer, address in wait.signals:
            departures = signals.get((peer, wait.place.rank, address), [])
            latest_ns = wait.end_ns + tolerance_ns
            count = bisect.bisect_right(departures, latest_ns, key=lambda sent: sent[0])
            if count:
                departure_ns, source = departures[count - 1]
                yield Flow(source, wait.place, min(departure_ns, wait.end_ns), wait.end_ns)


def _flows_of_words(
    waits: Sequence[Wait], puts: Sequence[Sent], tolerance_ns: float
) -> Iterator[Flow]:
    """Yield, for each wait for words that need no signal, each peer's last put of them before.

    The slice that is awaited is the tile that was put. A program that reads what other programs
    have put, in other tiles, waits for the last of them.
    """
    departures: dict[tuple[int, int, int | None], list[Sent]] = defaultdict(list)
    for put in sorted(puts, key=lambda put: put.time_ns):
        for tile in (put.tile, None):
            departures[put.place.launch, put.peer, tile].append(put)
    for wait in waits:
        if wait.signals:
            continue
        last: dict[int, Sent] = {}
        launch, rank = wait.place.launch, wait.place.rank
        of_tile = departures.get((launch, rank, wait.slice))
        for put in of_tile or departures.get((launch, rank, None), []):
            if put.time_ns > wait.end_ns + tolerance_ns:
                break
            last[put.place.rank] = put
        for put in last.values():
            departure_ns = min(put.time_ns, wait.end_ns)
            yield Flow(put.place, wait.place, departure_ns, wait.end_ns)


def causes_of(work: Work) -> dict[tuple[Place, float], Flow]:
    """Return, for each program and end of a wait, what was sent last of what it was for."""
    last: dict[tuple[Place, float], Flow] = {}
    for flow in work.flows:
        key = (flow.target, flow.arrival_ns)
        if key not in last or flow.departure_ns > last[key].departure_ns:
            last[key] = flow
    return last


def arrivals(work: Work) -> dict[Sent, float]:
    """Return when each put had certainly arrived: when a wait for what was sent later was over.

    Puts that no wait has covered, such as the last ones of a trace, are left out.
    """
    flows: dict[tuple[int, int], list[Flow]] = defaultdict(list)
    for flow in sorted(work.flows, key=lambda flow: flow.departure_ns):
        flows[flow.source.rank, flow.target.rank].append(flow)
    arrival_times: dict[Sent, float] = {}
    for put in work.puts:
        of_link = flows.get((put.place.rank, put.peer), [])
        first = bisect.bisect_left(of_link, put.time_ns, key=lambda flow: flow.departure_ns)
        if first < len(of_link):
            arrival_times[put] = of_link[first].arrival_ns
    return arrival_times
