"""Kernels of mapped outputs: what follows somebody else's kernel."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.comm.kernels import MOST_MOVERS
from interlace.mapped.layout import BARRIERS

_BARRIERS = tl.constexpr(BARRIERS)
_PROGRAMS = tl.constexpr(MOST_MOVERS)  # of a kernel, at most; each has barriers of its own


@triton.jit(do_not_specialize=["signals", "call"])
def meet(signals, epochs, ctx, sound, call, WORLD_SIZE: tl.constexpr):
    """A barrier of all ranks' streams. One program.

    Protocol: what kernels before this one stored, to peers too, is in the past of its signals (they
    release, at system scope), and what follows it comes after its waits (they acquire).

    Example: two ranks; a product on rank 0 stored rows to rank 1. Rank 1's kernel ends once rank
    0's signal is here, and the rows with it.
    """
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    flags = il.pointer(signals, tl.int32)
    il.barrier(flags, _if_sound(il.mark(epoch, call), sound), group, WORLD_SIZE)
    il.clear_old(flags, _BARRIERS * _PROGRAMS * 2 * WORLD_SIZE, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["pieces"])
def settle(counters, tiles, sound, ctx, pieces, PIECES: tl.constexpr):
    """After the kernel that counts: whether it has counted every tile of every piece, once. One
    program.

    Protocol: copies wait for ``tiles`` in each of the ``pieces`` counters. A counter that falls
    short is set to it, so that they end; what they have copied is then not announced (``sound`` is
    0), and the host is told.

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


@triton.jit(do_not_specialize=["slots", "result", "landing", "signals", "call", "rows"])
def collect(
    slots, result, landing, signals, epochs, ctx, sound, call, rows, columns, slot_stride,
    row_stride, WORLD_SIZE: tl.constexpr, HOW: tl.constexpr, IN_PLACE: tl.constexpr,
    CAPTURED: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """:func:`meet`, and then what every rank wrote for this one, ``[rank, row, column]``, goes to
    the contiguous ``result``.

    ``HOW`` is ``"copy"``: all of it, ``[rank * row, column]``. ``"sum"``: the sum over ranks,
    ``[row, column]``, float32 in rank order. ``"sum_for_all"``: that sum, of every rank: ``[rank *
    row, column]``; ``landing`` is symmetric memory of this size, the result itself if ``IN_PLACE``.

    Protocol: each program meets the programs of its index on all ranks, as :func:`meet` does. Under
    ``"sum_for_all"`` it then puts its tiles of this rank's sum into every peer's landing, signals,
    and waits for its peers' programs of the same index, whose tiles are then here. What does not
    come in time is NaN. Landings are free: a peer that has met this rank has read the one of the
    call before the last. Slots take turns, too, unless the call is ``CAPTURED``: then the next one
    may write to the same, and programs part only when their peers have read them, which the sums of
    all imply.

    Example: two ranks, slots [1, 2] and [10, 20] here: the result is [1, 2, 10, 20], or [11, 22],
    or the peer's sum behind these.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    me = il.rank(group)
    stamp = il.mark(epoch, call)
    meetings = il.pointer(signals, tl.int32)
    partings = meetings + _PROGRAMS * 2 * WORLD_SIZE
    met = il.barrier(meetings + program * 2 * WORLD_SIZE, _if_sound(stamp, sound), group, WORLD_SIZE).to(tl.int32)
    tiles = tiles_of(rows, columns, ROWS, COLS)
    target, there = il.pointer(result, DTYPE), il.pointer(landing, DTYPE)
    for tile in range(program, tiles, programs):
        m, n, inside = tile_at(tile, rows, columns, ROWS, COLS)
        here = il.pointer(slots, DTYPE) + m * row_stride + n
        if HOW == "copy":
            for source in tl.static_range(WORLD_SIZE):
                part = tl.load(here + source * slot_stride.to(tl.int64), mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(target + (source * rows.to(tl.int64) + m) * columns + n, il.nan_unless(met, part), mask=inside)
        else:
            total = tl.zeros([ROWS, COLS], tl.float32)
            for source in tl.static_range(WORLD_SIZE):
                part = tl.load(here + source * slot_stride.to(tl.int64), mask=inside, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
            value = il.nan_unless(met, total.to(DTYPE))
            first = me * rows.to(tl.int64) if HOW == "sum_for_all" else 0
            cells = (first + m) * columns + n
            if HOW == "sum_for_all":
                for step in tl.static_range(WORLD_SIZE - 1):
                    il.put(there + cells, value, (me + 1 + step) % WORLD_SIZE, group, inside)
            tl.store(target + cells, value, mask=inside)
    if (HOW == "sum_for_all") | CAPTURED:
        complete = il.barrier(partings + program * 2 * WORLD_SIZE, stamp, group, WORLD_SIZE).to(tl.int32)
    if HOW == "sum_for_all":
        if (not IN_PLACE) | (complete == 0):
            for tile in range(program, tiles, programs):
                m, n, inside = tile_at(tile, rows, columns, ROWS, COLS)
                for step in tl.static_range(WORLD_SIZE - 1):
                    cells = ((me + 1 + step) % WORLD_SIZE * rows.to(tl.int64) + m) * columns + n
                    value = il.get(there + cells, me, group, inside, 0.0)
                    tl.store(target + cells, il.nan_unless(complete, value), mask=inside)
    il.clear_old(meetings, _BARRIERS * _PROGRAMS * 2 * WORLD_SIZE, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit
def tiles_of(rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """How many tiles a matrix has."""
    return (rows + ROWS - 1) // ROWS * ((columns + COLS - 1) // COLS)


@triton.jit
def tile_at(tile, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Of one of them: its rows ``[ROWS, 1]`` (int64), its columns ``[1, COLS]``, and which of its
    elements there are.
    """
    across = (columns + COLS - 1) // COLS
    m = (tile // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    n = (tile % across * COLS + tl.arange(0, COLS))[None, :]
    return m, n, (m < rows) & (n < columns)


@triton.jit
def _if_sound(stamp, sound):
    """The stamp that a rank signals; where ``sound`` is 0, what it stored is no result, and it
    signals one that no peer waits for.
    """
    if sound is not None:
        stamp = tl.where(tl.load(sound) > 0, stamp, il.unmarked(stamp))
    return stamp
