"""A stencil over a matrix whose rows ranks share out unevenly: inner rows hide the halo exchange.

Each rank needs one row of each neighbour, its halos. The first program sends the neighbours theirs,
the programs of the inner rows wait for nobody, and the last ones wait for the halos, which have
come by then. One launch is one sweep; the host counts the sweeps, whose numbers are the epochs.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import interlace
import interlace.language as il

ROWS, WIDTH, SWEEPS = (4, 1, 7), 50, 6
"""Rows of each rank, columns, sweeps."""


@triton.jit(do_not_specialize=["halos", "signals", "epoch", "rows"])
def sweep(
    x, y, halos, signals, epoch, ctx, rows,
    WORLD_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``y = (x + its four neighbours) / 5``; outside of the whole matrix is zero.

    Protocol: halos are ``[epoch % 2][2][BLOCK]`` and signals ``[epoch % 2][2]``, the upper one
    first. Program 0 puts both, and no program waits before it has run, on any rank. A rank waits in
    each call for the ranks that it writes to, so two halves suffice.
    """
    group = il.join(ctx)
    me = il.rank(group)
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    slots = il.pointer(halos, tl.float32) + (epoch % 2) * 2 * BLOCK + column
    flags = il.in_turn(il.pointer(signals, tl.int32), epoch, 2)

    if program == 0:
        # My first row is the lower halo of the rank above, and my last row the upper one below.
        if me > 0:
            first = tl.load(x + column, mask=inside, other=0.0)
            il.put_signal(slots + BLOCK, first, flags + 1, epoch, me - 1, group)
        if me < WORLD_SIZE - 1:
            last = tl.load(x + (rows - 1) * WIDTH + column, mask=inside, other=0.0)
            il.put_signal(slots, last, flags, epoch, me + 1, group)

    # The last program has row 0, and the one before it the last row: they alone may have to wait.
    row = (program + 1) % rows
    here = x + row * WIDTH + column
    arrived = 1
    above = tl.zeros([BLOCK], tl.float32)
    below = tl.zeros([BLOCK], tl.float32)
    one = tl.arange(0, 1)
    if row > 0:
        above = tl.load(here - WIDTH, mask=inside, other=0.0)
    elif me > 0:
        arrived = il.wait(flags + one, epoch, me - 1, 0, group).to(tl.int32)
        above = il.get(slots, me, group)
    if row < rows - 1:
        below = tl.load(here + WIDTH, mask=inside, other=0.0)
    elif me < WORLD_SIZE - 1:
        arrived &= il.wait(flags + 1 + one, epoch, me + 1, 1, group).to(tl.int32)
        below = il.get(slots + BLOCK, me, group)
    middle = tl.load(here, mask=inside, other=0.0)
    left = tl.load(here - 1, mask=inside & (column > 0), other=0.0)
    right = tl.load(here + 1, mask=column < WIDTH - 1, other=0.0)
    total = (middle + above + below + left + right) / 5
    # After a failed wait the halo is of an earlier sweep, so the row is NaN.
    tl.store(y + row * WIDTH + column, il.nan_unless(arrived, total), mask=inside)


def matrix() -> torch.Tensor:
    """Return the whole matrix, the same on every rank."""
    return torch.rand(sum(ROWS), WIDTH, generator=torch.Generator().manual_seed(1))


def worker() -> torch.Tensor:
    """Sweep over this rank's rows, and return them."""
    group = interlace.group_of()
    block = triton.next_power_of_2(WIDTH)
    halos = interlace.empty_symmetric((2, 2, block), dtype=torch.float32)
    signals = interlace.empty_symmetric((2, 2), dtype=torch.int32)
    x = matrix().split(ROWS)[group.rank].to(group.device)
    y = torch.empty_like(x)
    for epoch in range(1, SWEEPS + 1):
        with group.running():
            sweep[(len(x),)](
                x=x, y=y, halos=halos.address, signals=signals.address, epoch=epoch,
                ctx=group.context("sweep"), rows=len(x), WORLD_SIZE=group.world_size, WIDTH=WIDTH,
                BLOCK=block,
            )  # fmt: skip
        x, y = y, x
    # This raises an error if a halo did not come before the deadline.
    group.synchronize()
    # No rank may free memory that a peer still uses.
    dist.barrier()
    return x.cpu()


def main() -> None:
    swept = torch.cat(interlace.launch(worker, len(ROWS)))
    expected = matrix()
    for _ in range(SWEEPS):
        padded = torch.nn.functional.pad(expected, (1, 1, 1, 1))
        rows = padded[1:-1, 1:-1] + padded[:-2, 1:-1] + padded[2:, 1:-1]
        expected = (rows + padded[1:-1, :-2] + padded[1:-1, 2:]) / 5
    error = (swept - expected).abs().max().item()
    print(f"{SWEEPS} sweeps over {ROWS} rows of {len(ROWS)} ranks: largest error {error:.1e}")
    assert error < 1e-6


if __name__ == "__main__":
    main()
