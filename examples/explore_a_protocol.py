"""Is a kernel's protocol right? Try many interleavings of two ranks in one process, and see what a
mistake does.

Every rank puts a tile in its neighbour's memory, signals, waits for its own tile, and adds 1. The
first version reuses the neighbour's memory in the next call without asking whether the tile has
been read; the second one asks.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton
import triton.language as tl

import interlace
import interlace.language as il
from interlace.testing import Rank, explore

SIZE, CALLS = 8, 3


@triton.jit
def shift(
    x,
    y,
    data,
    signals,
    epoch,
    ctx,
    WORLD_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    ASKS: tl.constexpr,
):
    """``y`` of rank r + 1 is ``x`` of rank r, plus 1."""
    group = il.join(ctx)
    me = il.rank(group)
    right, left = (me + 1) % WORLD_SIZE, (me + WORLD_SIZE - 1) % WORLD_SIZE
    i, one = tl.arange(0, SIZE), tl.arange(0, 1)
    tile, flags = il.pointer(data, tl.float32) + i, il.pointer(signals, tl.int32)
    il.put_signal(tile, tl.load(x + i), flags, epoch, right, group)
    arrived = il.wait(flags + one, epoch, left + one, 0, group, one == 0)
    tl.store(y + i, tl.where(arrived, il.get(tile, me, group) + 1, float("nan")))
    if ASKS:  # end the call with a message back: the tile has been read
        il.signal(flags + 1, epoch, left, group)
        il.wait(flags + 1 + one, epoch, right + one, 0, group, one == 0)


def program(rank: Rank, asks: bool) -> None:
    """What every rank does; it checks its own results."""
    data = interlace.empty_symmetric(SIZE, dtype=torch.float32)
    signals = interlace.empty_symmetric(2, dtype=torch.int32)
    rank.ready()  # schedules differ from here on
    for epoch in range(1, CALLS + 1):
        x, y = torch.full((SIZE,), 10.0 * epoch + rank.rank), torch.zeros(SIZE)
        with rank.group.running():
            shift[(1,)](
                x, y, data.address, signals.address, epoch, rank.group.context("shift"),
                WORLD_SIZE=rank.world_size, SIZE=SIZE, ASKS=asks,
            )  # fmt: skip
        left = (rank.rank - 1) % rank.world_size
        torch.testing.assert_close(y, torch.full((SIZE,), 10.0 * epoch + left + 1))


def main() -> None:
    report = explore(lambda rank: program(rank, asks=False), ranks=3, schedules=150)
    print(f"without asking, after {report.schedules} schedules: {report.failure}")
    assert report.failure is not None
    assert report.failure.kind in ("race", "wrong result")

    report = explore(lambda rank: program(rank, asks=True), ranks=3, schedules=150)
    print(
        f"with a message back: {report.schedules} schedules, nothing found; each rank ran "
        f"{report.runs / 3:g} times"
    )
    report.raise_if_failed()


if __name__ == "__main__":
    main()
