"""Triggered transfers: a kernel that counts its tiles, copies that wait for them; orders, pieces,
epochs, faults.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import inject
from tests.errors import error_of


def _worked_example() -> list[list[float]]:
    """Of the documentation: two ranks, two rows each; row d of a rank's product is for rank d."""
    out = interlace.TriggeredTransfers((2, 1), dtype=torch.float32, tiles=1)
    torch.mul(torch.tensor([[1.0], [2.0]]), 10.0 ** dist.get_rank(), out=out.begin())
    out.counters.add_(1)
    return out.exchange().flatten(0, 1).tolist()


def test_worked_example(ranks: Any) -> None:
    assert ranks(2).run(_worked_example) == [[[1.0], [10.0]], [[2.0], [20.0]]]


def _value(rank: int, epoch: int) -> torch.Tensor:
    return torch.arange(24 * 256).view(24, 256) + 10_000 * epoch + 1_000_000 * rank


def _epochs(order: str, pieces: int, shape: tuple[int, ...], faults: bool) -> list[torch.Tensor]:
    """Rows are written piece by piece, in an order of this rank's own, and counted in threes and
    fours; ranks differ in speed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = ranks * pieces
    tiles = [3 + i % 2 for i in range(count)]
    out = interlace.TriggeredTransfers(
        shape, dtype=torch.int64, tiles=tiles, pieces=pieces, order=order
    )
    results = []
    for epoch in range(4):
        value = _value(rank, epoch)
        target = out.begin()
        rows = target.flatten(0, -2)
        with inject(interlace.Faults(seed=rank, max_delay_s=0.01 if faults else 0.0)):
            for i in torch.randperm(
                count, generator=torch.Generator().manual_seed(rank + epoch)
            ).tolist():
                part, piece = divmod(i, pieces)
                source = out.destinations[part] * pieces + piece
                rows.tensor_split(count)[i].copy_(value.tensor_split(count)[source])
                for _ in range(tiles[i]):
                    out.counters[i] += 1
                if (rank + i) % 3 == 0:
                    time.sleep(0.002)
            results.append(out.exchange().flatten(0, -2).clone())
    return results


@pytest.mark.parametrize(
    ("world_size", "order", "pieces", "shape", "faults"),
    [
        (1, "natural", 2, (24, 256), False),
        (2, "rotated", 1, (24, 256), True),
        (4, "natural", 3, (24, 256), True),
        (4, "natural", 2, (4, 6, 256), False),
        (4, "rotated", 2, (24, 256), False),
    ],
)
def test_pieces_go_to_their_ranks(
    ranks: Any, world_size: int, order: str, pieces: int, shape: tuple[int, ...], faults: bool
) -> None:
    results = ranks(world_size).run(_epochs, order, pieces, shape, faults)
    for rank, epochs in enumerate(results):
        for epoch, received in enumerate(epochs):
            sent = [
                _value(source, epoch).tensor_split(world_size)[rank] for source in range(world_size)
            ]
            assert torch.equal(received, torch.cat(sent))


def _parts(order: str, pieces: int, sent: int) -> list[torch.Tensor]:
    """Parts are sent one by one, the last ones by ``exchange``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out = interlace.TriggeredTransfers((24, 256), dtype=torch.int64, pieces=pieces, order=order)
    results = []
    for epoch in range(3):
        rows, value = out.begin().tensor_split(ranks), _value(rank, epoch).tensor_split(ranks)
        for i, part in enumerate(torch.randperm(ranks).tolist()):
            rows[part].copy_(value[out.destinations[part]])
            if i < sent:
                out.send(part)
        results.append(out.exchange().flatten(0, 1).clone())
    return results


@pytest.mark.parametrize(
    ("world_size", "order", "pieces", "sent"),
    [(1, "natural", 1, 1), (4, "natural", 2, 4), (4, "rotated", 1, 2)],
)
def test_parts_are_sent(ranks: Any, world_size: int, order: str, pieces: int, sent: int) -> None:
    for rank, epochs in enumerate(ranks(world_size).run(_parts, order, pieces, sent)):
        for epoch, received in enumerate(epochs):
            parts = [
                _value(source, epoch).tensor_split(world_size)[rank] for source in range(world_size)
            ]
            assert torch.equal(received, torch.cat(parts))


def _missent() -> list[tuple[str, str, dict[str, object]]]:
    out = interlace.TriggeredTransfers((4, 512), dtype=torch.float32)
    counted = interlace.TriggeredTransfers((4, 512), dtype=torch.float32, tiles=1)
    errors = [error_of(out.send, 0)]
    out.begin().zero_()
    out.send(0)
    errors += [error_of(out.send, part) for part in (0, 2, -1)]
    counted.begin().zero_()
    errors.append(error_of(counted.send, 0))
    counted.counters.fill_(1)
    out.exchange()
    counted.exchange()
    return errors


def test_what_cannot_be_sent(ranks: Any) -> None:
    for errors in ranks(2).run(_missent):
        assert [error[0] for error in errors] == ["ArgumentError"] * 5
        assert errors[1][1].startswith(
            "TriggeredTransfers.send: an epoch must have begun in which part 0, of 2, was not "
            "sent, "
        )


def _copied_meanwhile() -> tuple[bool, dict[int, int], bool]:
    """The copy of the part for the other rank is there before the own part is written: nobody waits
    for the end.
    """
    rank, group = dist.get_rank(), interlace.group_of()
    out = interlace.TriggeredTransfers((2, 1024), dtype=torch.float32, tiles=1)
    before = dict(group.traffic.bytes_to)
    target = out.begin()
    target[1 - rank] = 7.0 + rank
    out.counters[1 - rank] += 1
    arrived, end = out._received[out.half][1 - rank], time.monotonic() + 20
    while not bool((arrived == 8.0 - rank).all()) and time.monotonic() < end:
        time.sleep(1e-3)
    early = bool((arrived == 8.0 - rank).all())
    target[rank] = 1.0
    out.counters[rank] += 1
    received = out.exchange()
    sent = {peer: nbytes - before.get(peer, 0) for peer, nbytes in group.traffic.bytes_to.items()}
    return early, sent, bool((received[rank] == 1.0).all())


def test_a_complete_piece_leaves_at_once(ranks: Any) -> None:
    for rank, outcome in enumerate(ranks(2).run(_copied_meanwhile)):
        assert outcome == (True, {1 - rank: 4096}, True)


def _miscounted(counted: int) -> tuple[Any, ...]:
    """Rank 0's kernel counts other than it said; rank 1 must not take what came for a result."""
    group = dist.new_group()
    out = interlace.TriggeredTransfers((4, 512), dtype=torch.float32, tiles=2, group=group)
    interlace.set_deadline(1.0, group)
    out.begin().fill_(1.0)
    out.counters.fill_(2)
    if dist.get_rank() == 0:
        out.counters[1] = counted
    outcome = error_of(out.exchange)
    later = error_of(out.begin)
    dist.barrier()
    return outcome, later


@pytest.mark.parametrize("counted", [1, 3])
def test_a_kernel_that_miscounts(ranks: Any, counted: int) -> None:
    (first, later), (peer, _) = ranks(2).run(_miscounted, counted)
    assert first[0] == later[0] == "MiscountError"
    assert first[1].startswith(
        "triggered transfers: the kernel on rank 0 must count every tile of a piece once; got "
        f"{counted} for the 2 of piece 1. "
    )
    assert first[2] == {"rank": 0, "piece": 1, "wanted": 2, "seen": counted}
    assert peer[0] == "PeerTimeoutError"


def _copying() -> bool:
    return any(thread.name == "interlace copies" for thread in threading.enumerate())


def _kernel_that_never_comes() -> tuple[bool, bool]:
    """Whether copies wait for a kernel, and whether they still do once the transfers are gone."""
    out = interlace.TriggeredTransfers((4, 512), dtype=torch.float32, tiles=2)
    out.begin()
    waiting, end = _copying(), time.monotonic() + 20
    del out
    gc.collect()
    while _copying() and time.monotonic() < end:
        time.sleep(0.01)
    dist.barrier()
    return waiting, _copying()


def test_a_kernel_that_never_comes(ranks: Any) -> None:
    assert ranks(2).run(_kernel_that_never_comes) == [(True, False)] * 2


def _failing_once(settings: dict[str, Any]) -> tuple[bool, list[list[float]]]:
    """A producer that raises after it has sent or counted half of its parts: that call fails, and
    the next one is right.
    """
    rank, failures = dist.get_rank(), [ZeroDivisionError()]

    def produce(*, out: torch.Tensor, send: Any = None, counters: Any = None) -> None:
        for part in range(2):
            out[part] = 10.0 * rank + part
            if send is not None:
                send(part)
            if counters is not None:
                counters[part] += 1
            if failures:
                raise failures.pop()

    run = interlace.fuse(produce, "all_to_all", shape=(2, 1, 4), dtype=torch.float32, **settings)
    with pytest.raises(ZeroDivisionError):
        run()
    return _copying(), run().flatten(1)[:, 0].tolist()


@pytest.mark.parametrize(
    "settings", [{}, {"transport": "copy_engine"}, {"transport": "copy_engine", "tiles": 1}]
)
def test_a_producer_that_fails(ranks: Any, settings: dict[str, Any]) -> None:
    outcomes = ranks(2).run(_failing_once, settings)
    assert outcomes == [(False, [0.0, 10.0]), (False, [1.0, 11.0])]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"tiles": 1, "pieces": 2},
            "TriggeredTransfers: pieces must divide the 3 rows for a rank; got 2.",
        ),
        (
            {"tiles": -1},
            (
                "TriggeredTransfers: tiles must be a number of 0 or more, or one for each of 2 "
                "pieces; got -1."
            ),
        ),
        (
            {"tiles": [1]},
            (
                "TriggeredTransfers: tiles must be a number of 0 or more, or one for each of 2 "
                "pieces; got [1]."
            ),
        ),
    ],
)
def test_bad_arguments(ranks: Any, more: dict[str, Any], message: str) -> None:
    assert ranks(2).run(_rejected, more) == [("ArgumentError", message)] * 2


def _rejected(more: dict[str, Any]) -> tuple[str, str]:
    return error_of(lambda: interlace.TriggeredTransfers((6, 1024), dtype=torch.float32, **more))[
        :2
    ]


def _rooted() -> str:
    def make() -> None:
        interlace.fuse(
            torch.mm, "gather", shape=(6, 1024), dtype=torch.float32, transport="copy_engine"
        )

    return error_of(make)[1]


def test_gather_takes_stores_only(ranks: Any) -> None:
    assert ranks(1).run(_rooted) == [
        "fuse: gather must have transport 'stores'; got 'copy_engine'."
    ]


def _different() -> str:
    return error_of(
        lambda: interlace.TriggeredTransfers(
            (6, 1024), dtype=torch.float32, tiles=3 + dist.get_rank()
        )
    )[0]


def test_ranks_that_disagree(ranks: Any) -> None:
    assert ranks(2).run(_different) == ["RankMismatchError"] * 2
