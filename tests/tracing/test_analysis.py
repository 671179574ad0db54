"""What is read out of events: waits and what ended them, the critical path, links, the summary."""

from __future__ import annotations

import pytest
import torch

from interlace.comm.replay.recording import RecordedLaunch
from interlace.comm.runtime import context
from interlace.tracing import clocks
from interlace.tracing.events import Event, Launch, Packed, pack, unpack
from interlace.tracing.libraries import Activity, beside
from interlace.tracing.perfetto import Timeline, to_perfetto
from interlace.tracing.summary import critical_path, summary
from interlace.tracing.work import Place, arrivals, work_of


def _event(time_ns: float, kind: str, number: int = 0, peer: int = -1, lane: int = 0) -> Event:
    return Event(time_ns, kind, number, peer, has_several=False, sm=5, lane=lane)


def _two_ranks() -> list[list[Launch]]:
    """Both ranks compute a tile, put it at the other, signal and wait; rank 1 begins 300 ns late.

    Signal 8 + s is the one that rank s sets.
    """
    launches = []
    for rank, start in ((0, 0.0), (1, 300.0)):
        peer = 1 - rank
        events = [
            _event(start, "begin"),
            _event(start + 10, "tile", 0),
            _event(start + 110, "computed", 0),
            _event(start + 120, "put", 4096, peer),
            _event(start + 130, "signal", 8 + rank, peer),
            # The first thread records rank 0, the second one rank 1; nobody waits for itself.
            _event(start + 140, "wait", 0, 0 if peer == 0 else -1, lane=0),
            _event(start + 140, "wait", 0, 1 if peer == 1 else -1, lane=1),
            _event(480.0, "arrived", 8, 0 if peer == 0 else -1, lane=0),
            _event(481.0, "arrived", 9, 1 if peer == 1 else -1, lane=1),
        ]
        launches.append([Launch("kernel", {0: events}, lost=0)])
    return launches


def test_times_of_ranks_are_those_of_the_first_clock() -> None:
    """What two ranks do at once has one time, though the clock of rank 1 is 5000 ns ahead."""
    at_ns, of_ranks = 1_700_000_000_000_000_000, []
    for offset_ns in (0, 5000):
        rings = torch.zeros(1, 1, 1 + context.RING_EVENTS, 2, dtype=torch.int64)
        rings[0, 0, 0, 0] = 1
        rings[0, 0, 1] = torch.tensor([at_ns + offset_ns, context.BEGIN])
        packed = pack([RecordedLaunch("kernel", rings)])
        copy = ["copy", 7, at_ns + 100 + offset_ns, 50.0]
        of_ranks.append(Packed(packed, 0, float(offset_ns), [copy]))
    launches, others = unpack(of_ranks)
    assert [launch.programs[0][0].time_ns for (launch,) in launches] == [0, 0]
    assert [activity.start_ns for (activity,) in others] == [100, 100]


def test_a_wait_is_ended_by_the_last_signal_before() -> None:
    work = work_of(_two_ranks(), 0.0)
    assert [
        (flow.source.rank, flow.target.rank, flow.departure_ns, flow.arrival_ns)
        for flow in work.flows
    ] == [(1, 0, 430.0, 480.0), (0, 1, 130.0, 480.0)]
    assert arrivals(work) == dict.fromkeys(work.puts, 480.0)
    durations = {
        (span.place.rank, span.activity): span.duration_ns
        for span in work.spans
        if span.activity in ("compute", "wait")
    }
    assert durations == {
        (0, "compute"): 100.0, (0, "wait"): 340.0, (1, "compute"): 100.0, (1, "wait"): 40.0,
    }  # fmt: skip


def test_the_critical_path_goes_through_the_late_rank() -> None:
    steps = critical_path(work_of(_two_ranks(), 0.0))
    assert [(step.place.rank, step.activity, step.duration_ns) for step in steps] == [
        (1, "other", 10.0),
        (1, "compute", 100.0),
        (1, "put", 10.0),
        (1, "put", 10.0),
        (0, "in flight", 50.0),
    ]


def test_the_summary_names_the_late_rank() -> None:
    launches = _two_ranks()
    text = summary(launches, work_of(launches, 0.0), is_timed=True)
    assert "rank 0: compute 21%, put 4%, wait 71%, other 4%" in text
    assert "link 0 to 1: 4.1 KB" in text
    assert "critical path, 180 ns: compute 56%, in flight 28%" in text
    assert "slowest: rank 1" in text
    assert "it began 300 ns later than the others" in text
    assert "a tile takes it 100 ns, and the others 100 ns" in text


def test_bytes_are_in_flight_until_the_wait_is_over() -> None:
    launches = _two_ranks()
    document = to_perfetto(Timeline(launches, work_of(launches, 0.0), []), {})
    counters = [
        (event["ts"], event["args"]["bytes"])
        for event in document["traceEvents"]
        if event["name"] == "1 to 0: bytes in flight"
    ]
    assert counters == [(0.42, 4096), (0.48, 0)]


def _with_words(time_of_put: float) -> list[list[Launch]]:
    """Rank 1 puts packed words of tile 3, for which rank 0 waits until 500."""
    sender = [_event(0, "begin"), _event(5, "tile", 3), _event(time_of_put, "put", 64, 0)]
    reader = [_event(0, "begin"), _event(10, "wait", 3), _event(500, "unpacked", 3)]
    return [[Launch("words", {7: reader}, 0)], [Launch("words", {4: sender}, 0)]]


@pytest.mark.parametrize(
    ("time_of_put", "departure"), [(400.0, 400.0), (550.0, 500.0), (700.0, None)]
)
def test_words_are_those_of_the_tile(time_of_put: float, departure: float | None) -> None:
    """A put may seem to leave after it has arrived, by no more than clocks may be wrong."""
    flows = work_of(_with_words(time_of_put), tolerance_ns=100.0).flows
    assert [(flow.source, flow.target, flow.departure_ns) for flow in flows] == (
        [] if departure is None else [(Place(1, 0, 4), Place(0, 0, 7), departure)]
    )


def test_nothing_recorded() -> None:
    launches: list[list[Launch]] = [[], []]
    work = work_of(launches, 0.0)
    assert critical_path(work) == []
    assert summary(launches, work, is_timed=True) == "No kernel has recorded an event."
    assert to_perfetto(Timeline(launches, work, []), {})["traceEvents"]


def test_clocks_are_compared_by_the_shortest_round_trip() -> None:
    """The client's clock is 1000000 behind; the second answer came back soonest."""
    far = 1_790_000_000_000_000_000
    clock = clocks.nearest(
        asked=[far, far + 1000], answered=[far + 400, far + 1080],
        told=[far + 1_000_333, far + 1_001_040],
    )  # fmt: skip
    assert clock == (-1_000_000.0, 40.0)


def test_libraries_are_on_the_clock_of_the_kernels() -> None:
    """CUPTI counts from elsewhere: two kernels that both have seen give the distance."""
    far = 1_790_000_000_000_000_000
    seen = [
        Activity("product", 7, 900, 50), Activity("kernel", 7, 1000, 200),
        Activity("copy", 9, 1100, 30), Activity("kernel", 7, 3000, 200),
    ]  # fmt: skip
    known = [("kernel", far + 1000), ("kernel", far + 3002), ("another", far)]
    assert beside(seen, known) == [
        Activity("product", 7, far + 900, 50), Activity("copy", 9, far + 1100, 30),
    ]  # fmt: skip
    assert beside(seen, [("another", far)]) == []
    own = [
        Activity("fill", 7, 10, 5), Activity("hold", 7, 20, 930), Activity("early", 7, 949, 5),
        Activity("prepare_recording", 7, 960, 5), *seen,
    ]  # fmt: skip
    assert beside(own, known) == [Activity("copy", 9, far + 1100, 30)]
    document = to_perfetto(
        Timeline([[]], work_of([[]], 0.0), [[Activity("copy", 9, 2000.0, 500.0)]]), {}
    )
    [bar] = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert (bar["name"], bar["ts"], bar["dur"]) == ("copy", 2.0, 0.5)
