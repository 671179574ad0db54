"""Kernels of mapped outputs, which run after a kernel that is not this library's, and of stamped
exchanges between nodes.
"""

import triton
import triton.language as tl

import interlace.language as il
from interlace.comm.launching.kernels import MOST_MOVERS
from interlace.mapped.layout import BARRIERS

_BARRIERS = tl.constexpr(BARRIERS)
# Each program has barriers of its own; this is the most programs that a kernel has.
_PROGRAMS = tl.constexpr(MOST_MOVERS)
# Bytes from one stamp to the next.
_STAMP_BYTES = tl.constexpr(16)


@triton.jit(do_not_specialize=["signals", "call"])
def meet(signals, epochs, ctx, is_valid, call, WORLD_SIZE: tl.constexpr):
    """Hold a barrier of all ranks' streams. One program.

    **Protocol.** Every rank signals every peer and waits for every peer's signal. The signals
    release at system scope, so everything that earlier kernels stored, to peers too, is visible to
    a peer that has seen the signal. The waits acquire, so what follows this kernel comes after
    them. If ``is_valid`` is 0, the rank signals an epoch that no peer waits for.

    **Example.** Two ranks; a product on rank 0 stored rows to rank 1. Rank 1's kernel ends once
    rank 0's signal has arrived, and the rows are then visible to rank 1.
    """
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    flags = il.pointer(signals, tl.int32)
    # The barrier signals first and waits then, so that no two ranks wait for each other.
    il.barrier(flags, _stamp_if_valid(il.mark(epoch, call), is_valid), group, WORLD_SIZE)
    # Signals of long ago would look like new ones when epochs' numbers come again.
    il.clear_old(flags, _BARRIERS * _PROGRAMS * 2 * WORLD_SIZE, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["pieces"])
def settle(counters, tiles, is_valid, ctx, pieces, PIECES: tl.constexpr):
    """Check that the kernel before this one has counted every tile of every piece once.

    One program.

    **Protocol.** Copies wait for ``tiles`` in each of the ``pieces`` counters. A counter with
    another number is set to that of its tiles, so that the copies end; ``is_valid`` becomes 0, so
    that they are not announced to the peers, and the host is told.

    **Example.** Two pieces of three tiles, counted 3 and 2: the second counter becomes 3, and
    ``is_valid`` becomes 0. The peer waits until its deadline, as no signal of this rank arrives.
    """
    group = il.join(ctx)
    lanes = tl.arange(0, PIECES)
    inside = lanes < pieces
    expected = tl.load(tiles + lanes, mask=inside, other=0)
    # Volatile, because copy engines and other kernels change the counters meanwhile.
    counted = tl.load(counters + lanes, mask=inside, other=0, volatile=True)
    wrong = inside & (counted != expected)
    first = tl.min(tl.where(wrong, lanes, PIECES), 0)
    if first < PIECES:
        is_first = lanes == first
        expected_count = tl.sum(tl.where(is_first, expected, 0), 0)
        count = tl.sum(tl.where(is_first, counted, 0), 0)
        il.report_miscount(group, first, expected_count, count)
    tl.store(is_valid, (first == PIECES).to(tl.int32))
    # This releases is_valid too: the copies, and the signals behind them, come after it.
    tl.atomic_xchg(counters + lanes, expected, mask=wrong, sem="release", scope="sys")


@triton.jit(do_not_specialize=["slots", "result", "landing", "signals", "call", "rows"])
def collect(
    slots, result, landing, signals, epochs, ctx, is_valid, call, rows, columns, slot_stride,
    row_stride, WORLD_SIZE: tl.constexpr, REDUCTION: tl.constexpr, IN_PLACE: tl.constexpr,
    CAPTURED: tl.constexpr, DTYPE: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Meet all ranks, then bring the data that they wrote for this rank into ``result``.

    The ranks have written ``[rank, row, column]``; ``result`` is contiguous. ``REDUCTION`` is
    ``"copy"``: all of it becomes ``[rank * row, column]``. ``"sum"``: the sum over ranks, ``[row,
    column]``, float32 in rank order. ``"sum_for_all"``: that sum, of every rank: ``[rank * row,
    column]``; ``landing`` is symmetric memory of this size, the result itself if ``IN_PLACE``.

    **Protocol.** Each program meets the programs of its index on all ranks, as :func:`meet` does.
    Under ``"sum_for_all"`` it then puts its tiles of this rank's sum into every peer's landing,
    signals, and waits for its peers' programs of the same index, whose tiles have then arrived.
    Tiles that do not arrive in time are NaN. Landings may be written again: a peer that has met
    this rank has read the one of the call before the last. Slots take turns, too, unless the call
    is ``CAPTURED``: then the next call may write to the same ones, and programs part only when
    their peers have read them, which the sums of all imply.

    **Example.** Two ranks, with slots [1, 2] and [10, 20] on this one: the result is [1, 2, 10,
    20], or [11, 22], or [11, 22] followed by the sums of the peer.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns, row_stride = il.multiple_of(columns, FACTOR), il.multiple_of(row_stride, FACTOR)
    slot_stride = il.multiple_of(slot_stride, FACTOR)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    meetings = il.pointer(signals, tl.int32)
    partings = meetings + _PROGRAMS * 2 * WORLD_SIZE
    # Each program has signals of its own, so that it may go on before the slowest program is here.
    meeting = meetings + program * 2 * WORLD_SIZE
    met = il.barrier(meeting, _stamp_if_valid(stamp, is_valid), group, WORLD_SIZE).to(tl.int32)
    tiles = tiles_of(rows, columns, ROWS, COLS)
    target, landed = il.pointer(result, DTYPE), il.pointer(landing, DTYPE)
    for tile in range(program, tiles, programs):
        m, n, inside = tile_at(tile, rows, columns, ROWS, COLS)
        part = il.pointer(slots, DTYPE) + m * row_stride + n
        if REDUCTION == "copy":
            for source in tl.static_range(WORLD_SIZE):
                value = _load_part(part + source * slot_stride.to(tl.int64), inside)
                lines = target + (source * rows.to(tl.int64) + m) * columns
                tl.store(lines + n, il.nan_unless(met, value), mask=inside)
        else:
            total = tl.zeros([ROWS, COLS], tl.float32)
            for source in tl.static_range(WORLD_SIZE):
                value = _load_part(part + source * slot_stride.to(tl.int64), inside)
                total += value.to(tl.float32)
            value = il.nan_unless(met, total.to(DTYPE))
            first = rank * rows.to(tl.int64) if REDUCTION == "sum_for_all" else 0
            cells = (first + m) * columns + n
            if REDUCTION == "sum_for_all":
                # Everyone gets this rank's sum; the next rank first, so that links share the load.
                for step in tl.static_range(WORLD_SIZE - 1):
                    il.put(landed + cells, value, (rank + 1 + step) % WORLD_SIZE, group, inside)
            tl.store(target + cells, value, mask=inside)
    # This barrier follows the puts: a peer that has seen its signal sees the sums. It also says
    # that the slots have been read.
    if (REDUCTION == "sum_for_all") | CAPTURED:
        parting = partings + program * 2 * WORLD_SIZE
        complete = il.barrier(parting, stamp, group, WORLD_SIZE).to(tl.int32)
    if REDUCTION == "sum_for_all":
        # In place, the sums have arrived in the result; only missing ones must become NaN.
        if (not IN_PLACE) | (complete == 0):
            for tile in range(program, tiles, programs):
                m, n, inside = tile_at(tile, rows, columns, ROWS, COLS)
                for step in tl.static_range(WORLD_SIZE - 1):
                    source = (rank + 1 + step) % WORLD_SIZE
                    cells = (source * rows.to(tl.int64) + m) * columns + n
                    value = il.get(landed + cells, rank, group, inside, 0.0)
                    tl.store(target + cells, il.nan_unless(complete, value), mask=inside)
    il.clear_old(meetings, _BARRIERS * _PROGRAMS * 2 * WORLD_SIZE, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit
def _load_part(pointers, inside):
    """Load data that a peer has stored, from the L2, as the L1 may hold older data."""
    return tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def tiles_of(rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the number of tiles of a matrix."""
    return (rows + ROWS - 1) // ROWS * ((columns + COLS - 1) // COLS)


@triton.jit
def tile_at(tile, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return a tile's rows ``[ROWS, 1]`` (int64), its columns ``[1, COLS]``, and its mask."""
    across = (columns + COLS - 1) // COLS
    m = (tile // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    n = (tile % across * COLS + tl.arange(0, COLS))[None, :]
    return m, n, (m < rows) & (n < columns)


@triton.jit
def _stamp_if_valid(stamp, is_valid):
    """Return the stamp that a rank signals.

    If ``is_valid`` is 0, the rank has stored no valid result, and no peer waits for its stamp.
    """
    if is_valid is not None:
        stamp = tl.where(tl.load(is_valid) > 0, stamp, il.unmarked(stamp))
    return stamp


@triton.jit(do_not_specialize=["stamps", "call", "count"])
def stamp_messages(stamps, epochs, ctx, call, count):
    """Write the stamp of this call ``count`` times, 16 bytes apart: one for each peer. One program.

    **Protocol.** Each stamp is a message to a peer, ahead of the data for it.

    **Example.** Three ranks: two stamps, which the peers compare with their own.
    """
    stamp = il.mark(il.next_epoch(epochs), call)
    for peer in range(count):
        tl.store(il.pointer(stamps + peer * _STAMP_BYTES, tl.int32), stamp)


@triton.jit(do_not_specialize=["stamps", "landing", "call", "count"])
def check_messages(sources, stamps, landing, is_valid, epochs, ctx, call, count, OUT: tl.constexpr):
    """Compare the stamps of ``count`` peers with this call's; count the call. One program.

    ``sources`` has a row ``[rank, offset in the landing in bytes, elements]`` per peer, in the
    order of the stamps that have arrived.

    **Protocol.** All data have arrived, or the group is broken. Data of another call are reported,
    and NaN takes their place; then, and if the group is broken, ``is_valid`` becomes 0, so that no
    later work uses them.

    **Example.** Two ranks: rank 0 finds the stamp of its own call, and ``is_valid`` becomes 1.
    """
    epoch, stamp, group, _ = il.enter(epochs, ctx, call)
    is_right = il.is_broken(group) == 0
    for source in range(count):
        entry = sources + 3 * source
        seen = tl.load(il.pointer(stamps + source * _STAMP_BYTES, tl.int32), volatile=True)
        if is_right & (seen != stamp):
            il.report_late(group, tl.load(entry).to(tl.int32), source + 1, stamp, seen)
            # The report has broken the group, so the slices of the remaining peers are void as
            # well.
            is_right = il.is_broken(group) == 0
        if not is_right:
            # Rows of any width: aligned like an element, not more.
            place = (landing + tl.load(entry + 1)).to(tl.pointer_type(OUT))
            il.fill_nan(place, tl.load(entry + 2))
    tl.store(is_valid, is_right.to(tl.int32))
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["landing", "elements"])
def void_message(is_valid, landing, ctx, elements, OUT: tl.constexpr):
    """Fill a slice with NaN if its sender made another call, or the group is broken. One program.

    **Protocol.** :func:`check_messages` has compared the stamps before, and the slice has arrived,
    or the group is broken; ``is_valid`` becomes 0 then, for all work that comes later.

    **Example.** Two ranks in different calls: each multiplies NaN instead of the other's rows.
    """
    group = il.join(ctx)
    if (tl.load(is_valid) == 0) | (il.is_broken(group) != 0):
        tl.store(is_valid, 0)
        il.fill_nan(landing.to(tl.pointer_type(OUT)), elements)
