"""Check the protocol of a kernel: try many interleavings of three ranks in one process.

Every rank puts a tile into its neighbour's memory, signals, waits for its own tile, and adds 1. The
first version writes into the neighbour's memory again in the next call, although the neighbour may
not have read the last tile. The second version waits for a message that it has.
"""

import os

# The explorer needs Triton's interpreter, which must be chosen before Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

import interlace
import interlace.language as il
from interlace_explorer import Rank, explore

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
    """Compute ``y`` of rank r + 1 as ``x`` of rank r, plus 1."""
    group = il.join(ctx)
    me = il.rank(group)
    right, left = (me + 1) % WORLD_SIZE, (me + WORLD_SIZE - 1) % WORLD_SIZE
    # il.wait takes a tile of signals; this tile has a single element.
    i, single = tl.arange(0, SIZE), tl.arange(0, 1)
    tile, flags = il.pointer(data, tl.float32) + i, il.pointer(signals, tl.int32)
    il.put_signal(tile, tl.load(x + i), flags, epoch, right, group)
    arrived = il.wait(flags + single, epoch, left, 0, group)
    tl.store(y + i, tl.where(arrived, il.get(tile, me, group) + 1, float("nan")))
    # The message back: this rank has read its tile, and its right neighbour has read the tile that
    # this rank has sent.
    if ASKS:
        il.signal(flags + 1, epoch, left, group)
        il.wait(flags + 1 + single, epoch, right, 0, group)


def program(rank: Rank, asks: bool) -> None:
    """Call the kernel three times on one rank, and check the results."""
    data = interlace.empty_symmetric(SIZE, dtype=torch.float32)
    signals = interlace.empty_symmetric(2, dtype=torch.int32)
    # Preparations are over: schedules differ in the calls that follow.
    rank.ready()
    for epoch in range(1, CALLS + 1):
        x, y = torch.full((SIZE,), 10.0 * epoch + rank.rank), torch.zeros(SIZE)
        with rank.group.running():
            shift[(1,)](
                x=x,
                y=y,
                data=data.address,
                signals=signals.address,
                epoch=epoch,
                ctx=rank.group.context("shift"),
                WORLD_SIZE=rank.world_size,
                SIZE=SIZE,
                ASKS=asks,
            )
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
