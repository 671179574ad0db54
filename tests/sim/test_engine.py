"""The engine and its servers: order, ties, queues."""

from __future__ import annotations

import pytest

from interlace_sim.engine import Engine, Join, Server, duration_ns


def test_events_come_in_order_of_time_then_of_scheduling() -> None:
    engine = Engine()
    seen: list[tuple[int, str]] = []
    for time, name in ((5, "b"), (3, "a"), (5, "c"), (0, "first")):
        engine.at(time, lambda name=name: seen.append((engine.now, name)))
    assert engine.run() == 5
    assert seen == [(0, "first"), (3, "a"), (5, "b"), (5, "c")]
    assert engine.events == 4


def test_an_event_may_schedule_another_for_the_same_instant() -> None:
    engine = Engine()
    seen: list[str] = []
    engine.at(1, lambda: (seen.append("one"), engine.after(0, seen.append, "three")))
    engine.at(1, seen.append, "two")
    engine.run()
    assert seen == ["one", "two", "three"]


def test_the_past_is_refused() -> None:
    engine = Engine()
    engine.at(5, lambda: engine.at(4, print))
    with pytest.raises(ValueError, match="must not lie in the past; got 4 ns at 5 ns"):
        engine.run()


def test_a_server_does_one_thing_at_a_time_in_order() -> None:
    server = Server("link")
    assert [server.reserve(0, 10), server.reserve(3, 5), server.reserve(100, 7)] == [0, 10, 100]
    assert (server.free_ns, server.busy_ns) == (107, 22)


def test_join_waits_for_all_and_for_nothing() -> None:
    seen: list[str] = []
    join = Join(2, lambda: seen.append("both"))
    Join(0, lambda: seen.append("none"))
    join.done()
    assert seen == ["none"]
    join.done()
    assert seen == ["none", "both"]


def test_durations_are_rounded_up() -> None:
    assert duration_ns(1, 1e9) == 1
    assert duration_ns(1, 3e9) == 1
    assert duration_ns(10, 3e9) == 4
    assert duration_ns(0, 3e9) == 0
