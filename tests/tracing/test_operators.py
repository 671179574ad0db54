"""Traces of every operator on the CPU backend: the events, their order, and the document."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.errors import ArgumentError
from interlace.testing.cases import Case, every_case
from interlace.tracing import Trace
from interlace.tracing.events import NAMES
from tests.tracing.chrome_format import violations

_KINDS = set(NAMES.values())


def _check_events(trace: Trace) -> None:
    """Each program begins once, and everything it records comes in an order that makes sense."""
    for of_rank in trace.launches:
        for launch in of_rank:
            assert launch.lost == 0
            for events in launch.programs.values():
                main = [event for event in events if event.lane == 0]
                assert main[0].kind == "begin"
                assert [event.kind for event in main].count("begin") == 1
                times = [event.time_ns for event in main]
                assert times == sorted(times)
                waiting = False
                for event in main:
                    assert event.kind in _KINDS
                    assert waiting == (event.kind in ("arrived", "unpacked"))
                    waiting = event.kind == "wait"
                tiles = [event for event in main if event.kind in ("tile", "computed")]
                for tile, computed in itertools.pairwise(tiles):
                    if computed.kind == "computed":
                        assert (tile.kind, tile.number) == ("tile", computed.number)


def _check_document(trace: Trace, ranks: int) -> Counter[str]:
    """The document keeps to the format; return how many events there are of each phase."""
    document = trace.to_perfetto()
    assert violations(document) == []
    events = document["traceEvents"]
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert named >= set(range(ranks))
    return Counter(event["ph"] for event in events)


def _trace_of(case: Case) -> Trace:
    prepared = case.prepare()
    with interlace.trace() as trace:
        assert not any(prepared.check()), case.label
    return trace


def _every_case() -> list[str]:
    """Trace a case of every implementation; return the labels of those that have recorded
    something.
    """
    recorded = []
    ranks = dist.get_world_size()
    # Further cases of an implementation run its kernels with other shapes and options.
    for _, (case, *_) in itertools.groupby(
        every_case(ranks), lambda case: (case.operator, case.impl)
    ):
        trace = _trace_of(case)
        _check_events(trace)
        counts = _check_document(trace, ranks)
        if counts["X"]:
            recorded.append(case.label)
    return recorded


def test_every_operator(ranks: Any) -> None:
    """Results are right, events are in order, and kernels of every operator that has any appear."""
    for labels in ranks(2).run(_every_case):
        operators = {label.split()[0] for label in labels}
        assert operators >= {
            operator
            for operator, implementations in _implementations().items()
            if "fused" in [implementation.split()[0] for implementation in implementations]
        }


def _implementations() -> Any:
    from interlace.testing.cases import IMPLEMENTATIONS

    return IMPLEMENTATIONS


def _one(operator: str, impl: str) -> Case:
    return next(case for case in every_case(2, [operator]) if case.impl == impl)


def _forward(operator: str, impl: str) -> Trace:
    return _trace_of(dataclasses.replace(_one(operator, impl), backward=False))


@pytest.mark.quick
def test_words_arrive_after_they_were_put(ranks: Any) -> None:
    """One token's product: every program puts its tile at the peer and waits for the peer's."""
    [trace, other] = ranks(2).run(_forward, "gemv_all_reduce", "gemv one_shot")
    assert trace.to_perfetto() == other.to_perfetto()
    work = trace.work
    for of_rank in trace.launches:
        [launch] = of_rank
        assert launch.name == "gemv_all_reduce_one_shot"
    assert {(flow.source.rank, flow.target.rank) for flow in work.flows} >= {(0, 1), (1, 0)}
    assert all(flow.departure_ns <= flow.arrival_ns for flow in work.flows)
    assert {put.peer for put in work.puts if put.place.rank == 0} == {1}
    assert "only the order of events counts" in trace.summary()


@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_to_all"])
def test_signals_arrive_after_they_were_set(ranks: Any, operator: str) -> None:
    """Tiles, and the signals behind them: each wait is ended by what the peer set last."""
    trace = ranks(2).run(_forward, operator, "fused")[0]
    ended = {(flow.target, flow.arrival_ns) for flow in trace.work.flows}
    assert ended == {(wait.place, wait.end_ns) for wait in trace.work.waits if wait.signals}
    assert all(flow.departure_ns <= flow.arrival_ns for flow in trace.work.flows)
    kinds = {event.kind for events in trace.launches[0][0].programs.values() for event in events}
    assert {"begin", "tile", "computed", "put", "signal", "wait", "arrived"} == kinds


def _misuses() -> list[str]:
    said = []
    with interlace.trace() as trace:
        for misuse in (lambda: trace.launches, lambda: interlace.trace().__enter__()):
            with pytest.raises(ArgumentError) as error:
                misuse()
            said.append(str(error.value))
    return said


def test_misuse_is_refused(ranks: Any) -> None:
    for read, nested in ranks(2).run(_misuses):
        assert "must have ended before it is read" in read
        assert "must not begin within another one" in nested


def _outside() -> tuple[int, str]:
    """What a trace leaves behind."""
    case = _one("gemv_all_reduce", "gemv one_shot")
    prepared = case.prepare()
    with interlace.trace():
        prepared.check()
    prepared.check()
    group = group_of(None)
    contexts = [group.context(case.operator + ".one_shot").dtype]
    with interlace.trace() as empty:
        pass
    return len(empty.launches[0]), str(contexts[0])


def test_a_trace_ends(ranks: Any) -> None:
    for launches, dtype in ranks(2).run(_outside):
        assert launches == 0
        assert dtype == str(torch.int64)


def test_more_events_than_a_ring_holds() -> None:
    """The last ones are kept, in order, and the others are counted."""
    from interlace.comm.runtime import context
    from interlace.tracing.events import Packed, _packed, timer_step_ns, unpack

    source = random.Random(0)
    count = context.RING_EVENTS + 10
    rings = torch.full((2, context.RING_LANES, 1 + context.RING_EVENTS, 2), -1).numpy()
    rings[:, :, 0] = 0
    rings[1, 0, 0, 0] = count
    numbers = [source.randrange(-(1 << 31), 1 << 31) for _ in range(count)]
    for index, number in enumerate(numbers):
        place = 1 + index % context.RING_EVENTS
        rings[1, 0, place] = 1000 + index, number << 32 | 7 << 16 | 3 << 8 | context.MARK
    packed = Packed([_packed("kernel", rings)], base=4096, offset_ns=7.0, others=[])
    [[launch]], _ = unpack([packed])
    assert timer_step_ns(packed.launches) == 1
    assert launch.lost == 10
    assert [event.number for event in launch.programs[1]] == numbers[10:]
    assert [event.time_ns for event in launch.programs[1]] == list(range(count - 10))
    assert {(event.sm, event.peer, event.kind) for event in launch.programs[1]} == {(7, 3, "mark")}
    # A library's product before the first event is where times count from.
    early = packed._replace(others=[["product", 7, 1010 - 200, 150]])
    [[launch]], [[product]] = unpack([early])
    assert (product.start_ns, product.duration_ns) == (0, 150)
    assert launch.programs[1][0].time_ns == 200
