"""The explorer finds mistakes in small kernels and none in right ones, and repeats failures."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

import interlace
from interlace_explorer import Rank, Report, explore
from interlace_gin import open_gin


def _memory() -> tuple[Any, Any]:
    data = interlace.empty_symmetric(4, dtype=torch.float32)
    return data, interlace.empty_symmetric(2, dtype=torch.int32)


def _sending(
    rank: Rank,
    calls: int = 2,
    acknowledged: bool = True,
    order: str = "release",
    fenced: bool = False,
    signal_first: bool = False,
) -> None:
    from tests.explorer import kernels

    (data, signals), context = _memory(), rank.group.context("test")
    rank.ready()
    for epoch in range(1, calls + 1):
        y = torch.zeros(4)
        with rank.group.running():
            kernels.send[(1,)](
                data.address,
                signals.address,
                float(epoch),
                epoch,
                context,
                ORDER=order,
                FENCED=fenced,
                SIGNAL_FIRST=signal_first,
            )
            kernels.receive[(1,)](data.address, signals.address, y, epoch, context)
            if acknowledged:
                kernels.acknowledge[(1,)](signals.address, epoch, context)
        if rank.rank == 1:
            torch.testing.assert_close(y, epoch + torch.arange(4.0))


def _waiting(rank: Rank) -> None:
    from tests.explorer import kernels

    _, signals = _memory()
    with rank.group.running():
        kernels.wait_for_each_other[(1,)](signals.address, rank.group.context("test"))


def _putting(rank: Rank) -> None:
    from tests.explorer import kernels

    data, _ = _memory()
    with rank.group.running():
        kernels.put_to_last[(1,)](
            data.address, rank.group.context("test"), WORLD_SIZE=rank.world_size
        )


def _swapping(rank: Rank) -> None:
    from tests.explorer import kernels

    (data, signals), y = _memory(), torch.zeros(4)
    rank.ready()
    with rank.group.running():
        context = rank.group.context("test")
        kernels.swap_without_waiting[(1,)](data.address, signals.address, y, context)
    torch.testing.assert_close(y, torch.ones(4))


def _adding(rank: Rank, waits: bool = True) -> None:
    from tests.explorer import kernels

    counts, signals = (interlace.empty_symmetric(4, dtype=torch.int32) for _ in range(2))
    y = torch.full((1,), -1, dtype=torch.int32)
    rank.ready()
    with rank.group.running():
        kernels.add_to_first[(1,)](
            counts.address,
            signals.address,
            y,
            rank.group.context("test"),
            WORLD_SIZE=rank.world_size,
            WAITS=waits,
        )
    if waits and rank.rank == 0:
        assert y.item() == 4 * rank.world_size


def _looking(rank: Rank) -> None:
    from tests.explorer import kernels

    _, signals = _memory()
    with rank.group.running():
        kernels.look_for_ever[(1,)](signals.address, rank.group.context("test"))


def _halves(rank: Rank) -> None:
    from tests.explorer import kernels

    (data, signals), y = _memory(), torch.zeros(8, dtype=torch.float16)
    with rank.group.running():
        kernels.put_halves[(1,)](data.address, y, signals.address, rank.group.context("test"))
    if rank.rank == 1:
        torch.testing.assert_close(y, torch.arange(8, dtype=torch.float16))


def _reaching(rank: Rank, primitive: str) -> None:
    """Use memory from its end on; other memory follows."""
    from tests.language import kernels

    first, _ = (interlace.empty_symmetric(1024, dtype=torch.float32) for _ in range(2))
    with rank.group.running():
        kernels.reach[(1,)](
            first.address, 4096, rank.group.context("test"), rank.rank, PRIMITIVE=primitive
        )


def _keeping(rank: Rank, kept: list[interlace.SymmetricTensor]) -> None:
    """Keep memory after the exploration."""
    kept.append(interlace.empty_symmetric(1 << 20, dtype=torch.uint8))


def _reaching_where_memory_was() -> Report:
    """Explore what reaches past the end of its memory, where memory of an earlier run was."""
    kept: list[interlace.SymmetricTensor] = []
    explore(functools.partial(_keeping, kept=kept)).raise_if_failed()
    report = explore(functools.partial(_reaching, primitive="put"))
    assert kept
    return report


def _words(rank: Rank, calls: int = 1) -> None:
    from tests.explorer import kernels

    words = interlace.empty_symmetric(4, dtype=torch.int64)
    for epoch in range(1, calls + 1):
        y = torch.zeros(4)
        with rank.group.running():
            kernels.put_words[(1,)](words.address, float(epoch), epoch, rank.group.context("test"))
            kernels.get_words[(1,)](words.address, y, epoch, rank.group.context("test"))
        if rank.rank == 1:
            torch.testing.assert_close(y, epoch + torch.arange(4.0))


def _failing(rank: Rank, error: type[Exception]) -> None:
    rank.ready()
    if rank.rank == 1:
        raise error("this rank has failed")


def _copying(rank: Rank, through: str) -> None:
    """Copy by PyTorch's operators on symmetric memory; with ``through="exchange"`` peers meet on
    the host.
    """
    sym = interlace.empty_symmetric(4, dtype=torch.float32)
    sym.peers[1 - rank.rank].copy_(torch.full((4,), 1.0 + rank.rank))
    if through == "exchange":
        rank.group.exchange("a barrier", None)
    torch.testing.assert_close(sym.local.clone(), torch.full((4,), 2.0 - rank.rank))


def _exploring(program: Any, schedules: int = 50, replay: str | None = None) -> Report:
    return explore(program, schedules=schedules, seed=3, replay=replay)


@pytest.mark.parametrize(
    "program",
    [
        _sending,
        functools.partial(_sending, order="relaxed", fenced=True),
        functools.partial(_sending, calls=1, acknowledged=False),
        _halves,
        _words,
        _adding,
        functools.partial(_copying, through="exchange"),
    ],
)
def test_right_kernels(ranks: Any, program: Any) -> None:
    """No schedule of a right kernel fails; ranks run once, whatever the number of schedules."""
    [report] = ranks(1).run(_exploring, program)
    report.raise_if_failed()
    assert report.schedules > 1
    assert report.runs <= 4


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        (
            functools.partial(_sending, order="relaxed"),
            "race",
            "rank 1, .*receive.* does not come after the store by rank 0, .*send",
        ),
        (
            functools.partial(_sending, signal_first=True),
            "race",
            "rank 1, .*receive.* does not come after the store by rank 0",
        ),
        (
            functools.partial(_sending, acknowledged=False),
            "race|wrong result",
            "may still load|not close",
        ),
        (
            functools.partial(_words, calls=2),
            "deadlock",
            "rank 1 waits for packed words, program 0 of get_words",
        ),
        (
            _waiting,
            "deadlock",
            r"rank 0 waits for \[1\], and sees \[0\], program 0 of wait_for_each_other, "
            r"kernels.py:\d+ .*; rank 1",
        ),
        (
            _putting,
            "two writers",
            "stores where another rank has stored before, and nothing orders the two",
        ),
        (
            functools.partial(_adding, waits=False),
            "race",
            "rank 1, .*add_to_first, stores what rank 0, .*add_to_first, may still load",
        ),
        (_looking, "error", r"looks at memory for ever: .* kernels.py:\d+ in look_for_ever"),
        *(
            (
                functools.partial(_reaching, primitive=primitive),
                "error",
                f"{primitive}.*: every address must be of symmetric memory of rank",
            )
            for primitive in ("put", "get", "signal", "wait", "get_packed", "get_lamport")
        ),
        (functools.partial(_copying, through=""), "race", "may still load|does not come after"),
        (
            functools.partial(_failing, error=RuntimeError),
            "error",
            "rank 1 raised RuntimeError: this rank has failed",
        ),
        (
            functools.partial(_failing, error=AssertionError),
            "wrong result",
            "on rank 1: this rank has failed",
        ),
    ],
)
def test_mistakes(ranks: Any, program: Any, kind: str, message: str) -> None:
    """Each mistake is found, with its kind and its line; the same schedule finds it again."""
    [report] = ranks(1).run(_exploring, program)
    assert report.failure is not None
    assert re.fullmatch(kind, report.failure.kind)
    assert re.search(message, report.failure.message)
    [again] = ranks(1).run(_exploring, program, 1, report.failure.schedule)
    assert again.failure is not None
    assert again.failure.kind == report.failure.kind
    with pytest.raises(
        interlace.InterlaceError, match=f"every schedule of a program must be right; got a ({kind})"
    ):
        report.raise_if_failed()


def test_a_race_is_said_before_the_wrong_result_of_its_schedule(ranks: Any) -> None:
    """A rank that does not wait ends with a wrong result before its peer's store makes it a
    race.
    """
    [report] = ranks(1).run(_exploring, _swapping, 1, "eager 0x2")
    assert report.failure is not None
    assert report.failure.kind == "race"
    assert re.fullmatch(
        r"rank 1, .* in swap_without_waiting, stores what rank 0, .* in swap_without_waiting, may "
        r"still load: nothing says that its load is over; the same schedule has a wrong result on "
        r"rank 0: .* not close!.*",
        report.failure.message,
    )


def test_memory_of_an_earlier_run_counts_no_longer(ranks: Any) -> None:
    """Memory past the end is nobody's, even if a tensor of an earlier exploration lay there."""
    [report] = ranks(1).run(_reaching_where_memory_was)
    assert report.failure is not None
    assert "put: every address must be of symmetric memory of rank" in report.failure.message


def test_the_same_seed_tries_the_same_schedules(ranks: Any) -> None:
    [first] = ranks(1).run(_exploring, functools.partial(_sending, calls=3), 30)
    [again] = ranks(1).run(_exploring, functools.partial(_sending, calls=3), 30)
    assert first.schedules == again.schedules > 3
    assert first.failure is again.failure is None


def _refusals() -> list[str]:
    messages = []
    for options in (
        {"ranks": 1},
        {"schedules": 0},
        {"preemptions": -1},
        {"replay": "0x1"},
        {"replay": "eager 1!7"},
    ):
        with pytest.raises(interlace.ArgumentError) as error:
            explore(_sending, **options)
        messages.append(str(error.value))
    return messages


def test_refusals(ranks: Any) -> None:
    [messages] = ranks(1).run(_refusals)
    numbers, text, steps = messages[:3], messages[3], messages[4]
    assert all(message.startswith("explore: ranks must be at least 2") for message in numbers)
    assert "replay must be the schedule of a failure" in text
    assert "one that it cannot follow" in steps


def _opening_gin(rank: Rank) -> None:
    open_gin(signals=1)


def _tracing(rank: Rank) -> None:
    with interlace.trace():
        rank.ready()


def _outside() -> list[str]:
    programs = _opening_gin, _tracing
    return [str(explore(program, ranks=2, schedules=5).failure) for program in programs]


def test_what_only_runs_outside_of_the_explorer_says_so(ranks: Any) -> None:
    [(network, trace)] = ranks(1).run(_outside)
    assert "open_gin must be called outside of interlace_explorer.explore" in network
    assert "a trace must begin outside of interlace_explorer.explore" in trace


def _awaiting_a_scalar(rank: Rank) -> None:
    from tests.language import kernels

    _, signals = _memory()
    rank.ready()
    with rank.group.running():
        kernels.wait_for_a_scalar[(1,)](signals.address, rank.group.context("test"))


def _refused_wait() -> tuple[str, str]:
    failure = explore(_awaiting_a_scalar, ranks=2, schedules=5).failure
    assert failure is not None
    return failure.kind, str(failure)


def test_a_signal_that_is_no_tile_is_refused_before_it_is_awaited(ranks: Any) -> None:
    """Nobody sets it, so else it would be reported as a deadlock."""
    [(kind, text)] = ranks(1).run(_refused_wait)
    assert kind == "error"
    assert "ptr must be a 1-D tile of signals" in text


# Several nodes


def _straying(rank: Rank) -> None:
    """Every rank puts to the last one, which is on a node of its own."""
    from tests.explorer import kernels

    block = rank.group.allocate(64)
    with rank.group.running():
        kernels.put_to_last[(1,)](
            block.address, rank.group.context("test"), WORLD_SIZE=rank.world_size
        )


def _found() -> tuple[str, str]:
    failure = explore(_straying, ranks=3, schedules=5, node_of_rank=(0, 0, 1)).failure
    assert failure is not None
    return failure.kind, str(failure)


def test_a_store_to_another_node_is_found(ranks: Any) -> None:
    [(kind, text)] = ranks(1).run(_found)
    assert kind == "error"
    assert "a store must stay within its node; got one to rank 2 of node 1" in text


@pytest.mark.parametrize("nodes", [(0, 0), (1, 0), (0, 1, 1)])
def test_nodes_must_be_those_of_the_ranks(nodes: tuple[int, ...]) -> None:
    with pytest.raises(
        interlace.ArgumentError, match="node_of_rank must number the nodes of 2 ranks"
    ):
        explore(_straying, ranks=2, node_of_rank=nodes)
