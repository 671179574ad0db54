"""Kernels of mapped outputs: what follows somebody else's kernel."""

import triton
import triton.language as tl

import interlace.language as il


@triton.jit(do_not_specialize=["signals", "call"])
def meet(signals, epochs, ctx, sound, call, WORLD_SIZE: tl.constexpr):
    """A barrier of all ranks' streams. One program.

    Protocol: what kernels before this one stored, to peers too, is in the past of its signals (they release, at system scope), and
    what follows it comes after its waits (they acquire). Where ``sound`` is 0, what this rank stored is no result: its signals are
    then none that anyone waits for.

    Example: two ranks; a product on rank 0 stored rows to rank 1. Rank 1's kernel ends once rank 0's signal is here, and the rows
    with it.
    """
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    stamp = il.mark(epoch, call)
    if sound is not None:
        stamp = stamp * tl.load(sound)
    # Two sets of signals in turn: a rank may be one barrier ahead, and its next one may be of another call, with another mark.
    il.barrier(il.pointer(signals, tl.int32) + (epoch & 1) * WORLD_SIZE, stamp, group, WORLD_SIZE)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["pieces"])
def settle(counters, tiles, sound, ctx, pieces, PIECES: tl.constexpr):
    """After the kernel that counts: whether it has counted every tile of every piece, once. One program.

    Protocol: copies wait for ``tiles`` in each of the ``pieces`` counters. A counter that falls short is set to it, so that they
    end; what they have copied is then not announced (``sound`` is 0), and the host is told.

    Example: two pieces of three tiles, counted 3 and 2: the second counter becomes 3, ``sound`` 0.
    """
    group = il.join(ctx)
    lanes = tl.arange(0, PIECES)
    inside = lanes < pieces
    wanted = tl.load(tiles + lanes, mask=inside, other=0)
    counted = tl.load(counters + lanes, mask=inside, other=0, volatile=True)
    wrong = inside & (counted != wanted)
    first = tl.min(tl.where(wrong, lanes, PIECES), 0)
    if first < PIECES:
        here = lanes == first
        il.report_miscount(group, first, tl.sum(tl.where(here, wanted, 0), 0), tl.sum(tl.where(here, counted, 0), 0))
    tl.store(sound, (first == PIECES).to(tl.int32))
    tl.atomic_xchg(counters + lanes, wanted, mask=wrong, sem="release", scope="sys")


@triton.jit(do_not_specialize=["result", "first", "rows"])
def sum_slots(
    slots, result, ctx, first, rows, columns, slot_stride, row_stride, result_stride, WORLD_SIZE: tl.constexpr,
    BROADCAST: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The sum of what every rank wrote, float32, in rank order.

    Protocol: the slots are this rank's, and complete. The sum goes to ``result``: rows ``first`` and following of every rank's
    (``BROADCAST``; symmetric), else rows 0 and following of this rank's own.

    Example: two ranks, slots [1, 2] and [10, 20] here: result [11, 22].
    """
    group = il.join(ctx)
    me = il.rank(group)
    lines, lanes = tl.arange(0, ROWS), tl.arange(0, COLS)
    tiles_n = (columns + COLS - 1) // COLS
    tiles = (rows + ROWS - 1) // ROWS * tiles_n
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m = (tile // tiles_n * ROWS + lines).to(tl.int64)[:, None]
        n = (tile % tiles_n * COLS + lanes)[None, :]
        inside = (m < rows) & (n < columns)
        total = tl.zeros([ROWS, COLS], tl.float32)
        for source in tl.static_range(WORLD_SIZE):
            part = tl.load(slots + source * slot_stride.to(tl.int64) + m * row_stride + n, mask=inside, other=0.0)
            total += part.to(tl.float32)
        value = total.to(DTYPE)
        target = il.pointer(result, DTYPE) + (first + m) * result_stride + n
        if BROADCAST:
            for step in tl.static_range(WORLD_SIZE):
                il.put(target, value, (me + 1 + step) % WORLD_SIZE, group, inside)
        else:
            tl.store(target, value, mask=inside)
