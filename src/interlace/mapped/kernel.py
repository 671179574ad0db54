"""Kernels of mapped outputs: what follows somebody else's kernel."""

import triton
import triton.language as tl

import interlace.language as il


@triton.jit(do_not_specialize=["signals", "call"])
def meet(signals, epochs, ctx, call, WORLD_SIZE: tl.constexpr):
    """A barrier of all ranks' streams. One program.

    Protocol: what kernels before this one stored, to peers too, is in the past of its signals (they release, at system scope), and
    what follows it comes after its waits (they acquire).

    Example: two ranks; a product on rank 0 stored rows to rank 1. Rank 1's kernel ends once rank 0's signal is here, and the rows
    with it.
    """
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    # Two sets of signals in turn: a rank may be one barrier ahead, and its next one may be of another call, with another mark.
    il.barrier(il.pointer(signals, tl.int32) + (epoch & 1) * WORLD_SIZE, il.mark(epoch, call), group, WORLD_SIZE)
    il.advance_epoch(epochs, epoch)


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
