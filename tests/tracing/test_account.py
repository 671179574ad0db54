"""Why a call takes longer than its product: timelines made up for one reason each."""

from __future__ import annotations

import pytest

from interlace.tracing.account import PHASES, account
from interlace.tracing.events import Event, Launch
from interlace.tracing.libraries import Activity
from interlace.tracing.summary import summary
from interlace.tracing.work import work_of

_KINDS = {"begin", "tile", "computed", "put", "signal", "wait", "arrived"}


def _program(rank: int, *events: tuple[float, str], sm: int = 0) -> list[Event]:
    """Return a program's events on an SM; a signal, or what is awaited, is the other rank's."""
    made = []
    for time_ns, kind in events:
        assert kind in _KINDS
        # A signal is known by its place: rank r sets number r.
        number = {"signal": rank, "arrived": 1 - rank, "put": 4096}.get(kind, 0)
        peer = 1 - rank if kind in ("put", "signal", "wait", "arrived") else -1
        made.append(Event(time_ns, kind, number, peer, has_several=False, sm=sm, lane=0))
    return made


def _late_rank() -> list[dict[int, list[Event]]]:
    """Rank 1 begins 300 ns late, and rank 0, which ends last, waits for it."""
    return [
        {0: _program(0, (0, "begin"), (10, "tile"), (110, "computed"), (120, "signal"),
                     (120, "wait"), (460, "arrived"))},
        {0: _program(1, (300, "begin"), (310, "tile"), (410, "computed"), (420, "signal"),
                     (420, "wait"), (440, "arrived"))},
    ]  # fmt: skip


def _slow_puts() -> list[dict[int, list[Event]]]:
    """Each of two tiles takes 100 ns, and each put 50 ns."""
    events = [(0, "begin"), (0, "tile"), (100, "computed"), (150, "put"), (150, "tile"),
              (250, "computed"), (300, "put")]  # fmt: skip
    return [{0: _program(rank, *events)} for rank in (0, 1)]


def _tail() -> list[dict[int, list[Event]]]:
    """Program 1 begins its one tile when program 0 has computed half of its two."""
    return [
        {0: _program(0, (0, "begin"), (20, "tile"), (120, "computed"), (120, "tile"),
                     (220, "computed")),
         1: _program(0, (0, "begin"), (170, "tile"), (290, "computed"), (300, "put"))},
    ]  # fmt: skip


def _waves() -> list[dict[int, list[Event]]]:
    """Two programs fit at once; the third one begins on the SM of the first, which it follows."""
    tiles = [(0, 100, 3), (0, 130, 5), (105, 205, 3)]
    return [
        {
            program: _program(
                0, (start, "begin"), (start, "tile"), (end, "computed"), (end + 5, "put"), sm=sm
            )
            for program, (start, end, sm) in enumerate(tiles)
        },
    ]


def _copies_behind_products() -> tuple[list[dict[int, list[Event]]], list[list[Activity]]]:
    """A library multiplies twice 100 ns; the second copy ends 60 ns after that, then sums."""
    waits = _program(0, (150, "begin"), (150, "wait"), (260, "arrived"), (290, "put"))
    others = [
        Activity("nvjet_tst_128x256", 7, 0.0, 100.0), Activity("Memcpy PtoP", 9, 100.0, 80.0),
        Activity("nvjet_tst_128x256", 7, 100.0, 100.0), Activity("Memcpy PtoP", 9, 200.0, 60.0),
    ]  # fmt: skip
    return [{0: waits}], [others]


@pytest.mark.parametrize(
    ("programs", "others", "phases", "waits", "reason"),
    [
        (
            _late_rank(), [],
            {"launch": 10, "compute": 100, "put": 10, "wait": 340}, [(1, 300, 40)],
            "460 ns, 360% above the product's 100 ns: waits for rank 1 (300 ns until it had sent), "
            "340 ns",
        ),
        (
            _slow_puts(), [], {"compute": 200, "put": 100}, [],
            "300 ns, 50% above the product's 200 ns: puts and signals between tiles, 100 ns",
        ),
        (
            _tail(), [], {"launch": 20, "compute": 200, "tail": 70, "put": 10}, [],
            "300 ns, 50% above the product's 200 ns: tiles of other programs after its last one, "
            "70 ns",
        ),
        (
            _waves(), [], {"compute": 200, "put": 10}, [],
            "210 ns, 5% above the product's 200 ns: puts and signals between tiles, 10 ns",
        ),
        (
            *_copies_behind_products(), {"compute": 200, "copy": 60, "put": 30}, [],
            "290 ns, 45% above the product's 200 ns: copies and collectives while nothing is "
            "multiplied, 60 ns",
        ),
    ],
    ids=["late rank", "slow puts", "tail", "waves", "copies behind products"],
)  # fmt: skip
def test_each_reason_is_found(
    programs: list[dict[int, list[Event]]],
    others: list[list[Activity]],
    phases: dict[str, float],
    waits: list[tuple[int, float, float]],
    reason: str,
) -> None:
    launches = [[Launch("kernel", of_rank, 0)] for of_rank in programs]
    spent = account(work_of(launches, 0.0), others)
    assert spent is not None
    assert {phase: time for phase, time in spent.phases.items() if time} == phases
    assert tuple(spent.phases) == PHASES
    assert sum(spent.phases.values()) == spent.total_ns
    assert [(each.rank, each.unsent_ns, each.flight_ns) for each in spent.waits] == waits
    assert spent.finding() == reason
    lines = summary(launches, work_of(launches, 0.0), others, is_timed=True).splitlines()
    total = next(line for line in lines if line.startswith("total: "))
    assert f"{spent.excess:.0%} above the product alone" in total
    if spent.programs:
        numbers = ", ".join(map(str, spent.programs))
        assert f"{spent.tiles} tile" in total
        assert f"{'program' if len(spent.programs) == 1 else 'programs'} {numbers})" in total


def test_programs_that_follow_one_another_on_an_sm_count_together() -> None:
    spent = account(work_of([[Launch("kernel", _waves()[0], 0)]], 0.0))
    assert spent is not None
    assert spent.programs == (0, 2)
    assert spent.tiles == 2


def test_libraries_alone_have_an_account() -> None:
    """A pair of cuBLAS and NCCL records nothing, and is seen all the same."""
    others = [[Activity("nvjet_tst", 7, 0.0, 300.0), Activity("ncclDevKernel", 8, 310.0, 60.0)]]
    text = summary([[]], work_of([[]], 0.0), others, is_timed=True)
    assert "370 ns, 23% above the product alone, 300 ns" in text
    assert "  60 ns: copies and collectives while nothing is multiplied" in text
    assert "  10 ns: nothing runs" in text
