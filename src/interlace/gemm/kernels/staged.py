"""Small kernels that move rows before a product: around the copies of ``fetch.py``, and in their
place.

The README.md of ``all_gather_gemm`` explains the protocols.
"""

import triton
import triton.language as tl

import interlace.language as il
from interlace.comm.kernels import MOST_MOVERS
from interlace.mapped.kernel import tile_at, tiles_of
from interlace.gemm.kernels import layout

_MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
_DONE = tl.constexpr(layout.DONE)
_COUNTER = tl.constexpr(layout.COUNTER)
_FIRST_ROW = tl.constexpr(layout.FIRST_ROW)
_ROWS = tl.constexpr(layout.ROWS)
_ROUTE = tl.constexpr(layout.ROUTE)
_HEADER = tl.constexpr(layout.HEADER)
_PROGRAMS = tl.constexpr(MOST_MOVERS)  # of a kernel, at most; each has a barrier of its own


@triton.jit(
    do_not_specialize=[
        "staged_address", "scale_offset", "own_address", "own_first", "own_rows", "own_share",
        "own_distance", "signals", "call", "rows", "K", "x_stride", "x_scale_stride",
        "inner_groups",
    ]
)
def stage_rows(
    x, x_scale, staged_address, scale_offset, own_address, own_first, own_rows, own_share,
    own_distance, signals, epochs, ctx, call, rows, K, x_stride, x_scale_stride, inner_groups,
    WORLD_SIZE: tl.constexpr, OWN: tl.constexpr, INNER_ALIGN: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Copy this rank's rows to where peers may fetch them, and tell them.

    Protocol: wait until every peer has fetched the rows of the call before (its signal ``[DONE]``,
    of the last call's set), copy, and set this rank's signal at every peer. That has one set: it is
    set again after DONE of its reader.

    Of ``own_rows`` from ``own_first`` on, no peer's if ``OWN`` is ``"only"`` and everybody's if it
    is ``"too"``, each ``own_share`` go to ``own_address``, ``own_distance`` rows from one to the
    next.

    Example: two ranks; rank 1's third call finds 2 in the signal that rank 0 sets, copies its rows,
    and sets 3 on rank 0.
    """
    program = tl.program_id(0)
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    flags = il.pointer(signals, tl.int32)
    K_padded = inner_groups * INNER_ALIGN
    last = il.previous_epoch(epoch)
    free = il.wait(il.in_turn(flags + _DONE, last, _MAX_RANKS) + peers, last, peers, 0, group, others).to(tl.int32)
    target = il.peer_pointer(il.pointer(staged_address, x.dtype.element_ty), me, group)
    lines, columns = tl.arange(0, ROWS), tl.arange(0, COLS)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        m = (first + lines).to(tl.int64)[:, None]
        place = m - own_first
        own = (place >= 0) & (place < own_rows)
        for start in range(0, K, COLS):
            k = start + columns[None, :]
            value = tl.load(x + m * x_stride + k, mask=(m < rows) & (k < K), other=0.0)
            inside = (m < rows) & (k < K_padded)  # libraries read the padding, too: it is zero
            if OWN is not None:
                here = il.pointer(own_address, x.dtype.element_ty)
                line = place // own_share * own_distance + place % own_share
                tl.store(here + line * K_padded + k, il.nan_unless(free, value), mask=inside & own)
            staged = inside & ~own if OWN == "only" else inside
            tl.store(target + m * K_padded + k, value, mask=staged & (free + m * 0 > 0))
        if x_scale is not None:
            scale = tl.load(x_scale + (first + lines) * x_scale_stride, mask=first + lines < rows, other=0.0)
            scales = il.peer_pointer(il.pointer(staged_address + scale_offset, tl.float32), me, group)
            tl.store(scales + first + lines, scale, mask=(first + lines < rows) & (free + lines * 0 > 0))
    if free > 0:
        counter = il.peer_pointer(flags + _COUNTER, me, group)
        if il.arrive_last(counter, program, tl.num_programs(0)):
            il.signal(flags + me + tl.zeros_like(peers), il.mark(epoch, call), peers, group, others)
    il.clear_old(flags + _HEADER, WORLD_SIZE, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["signals", "call"])
def await_rows(signals, ctx, notes, call, WORLD_SIZE: tl.constexpr):
    """Wait for every peer's :func:`stage_rows`: copies follow on the same stream.

    ``notes``, for what follows: this call's epoch; its stamp, or what no call waits for if a peer's
    rows have not come.

    Example: two ranks; rank 1's third call ends once rank 0 has set 3 here.
    """
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    # Nothing else counts here, nor changes it while this runs
    epoch = il.following_epoch(tl.load(notes))
    stamp = il.mark(epoch, call)
    arrived = il.wait(il.pointer(signals, tl.int32) + peers, stamp, peers, 0, group, others)
    tl.store(notes, epoch)
    tl.store(notes + 1, stamp * arrived.to(tl.int32))


@triton.jit(do_not_specialize=["signals", "cells"])
def release_rows(signals, ctx, notes, whole, cells, WORLD_SIZE: tl.constexpr):
    """Tell every peer that its rows have been fetched. If a peer's rows have not come, all
    ``cells`` of ``whole`` become NaN.
    """
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    epoch = tl.load(notes)
    done = il.in_turn(il.pointer(signals, tl.int32) + _DONE, epoch, _MAX_RANKS)
    il.signal(done + me + tl.zeros_like(peers), epoch, peers, group, others)
    if tl.load(notes + 1) == 0:
        il.fill_nan(whole, cells)


@triton.jit(do_not_specialize=["call", "blocks", "cells"])
def settle_products(y, epochs, notes, call, blocks, cells, BLOCK: tl.constexpr):
    """Behind products that know nothing of arrivals: where a peer's rows have not come, y becomes
    NaN.

    Protocol: :func:`await_rows` has written this call's stamp to ``notes`` if all came. Advances
    the epochs of the operator's own kernel, if it has one, which takes turns with this.

    Example: rank 1 never called; rank 0's products were of memory that nobody wrote, and its y is
    NaN everywhere.
    """
    epoch = il.next_epoch(epochs)
    if tl.load(notes + 1) != il.mark(epoch, call):
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            place = (block + tl.zeros([BLOCK], tl.int64)) * BLOCK + tl.arange(0, BLOCK)
            nothing = tl.full([BLOCK], float("nan"), tl.float32)
            tl.store(y + place, nothing.to(y.dtype.element_ty), mask=place < cells)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["landing_address", "half_bytes", "signals", "call", "share", "distance"])
def spread_rows(
    x, whole, landing_address, half_bytes, signals, epochs, ctx, routes, call, share, distance, K,
    x_stride, whole_stride, WORLD_SIZE: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Store this rank's rows in every rank's memory, and gather what the peers store here.

    Row m of those that rank s gives to a rank goes to row ``routes[s] + m // share * distance + m %
    share``. Every rank gets the same rows, or (``EACH``) rank r those from the r-th part of x.

    Protocol: each program puts its tiles into the landing of every peer, in the half of this epoch,
    meets its peers' programs of the same index, and copies what they have put here into ``whole``,
    an ordinary tensor; NaN where it did not come. The half is free: a peer that has signalled the
    call before this one has copied the one before that. Columns of ``whole`` beyond K become zero:
    libraries that multiply it may read them.

    Example: two ranks with one row each, a on rank 0 and b on rank 1. Rank 0 stores a in row 0 of
    its ``whole`` and of rank 1's landing, and copies b from row 1 of its own landing.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    me = il.rank(group)
    stamp = il.mark(epoch, call)
    flags = il.pointer(signals, tl.int32)
    landing = il.pointer(landing_address + (epoch & 1) * half_bytes, x.dtype.element_ty)
    first = tl.load(routes + me * _ROUTE + _FIRST_ROW)
    rows = tl.load(routes + me * _ROUTE + _ROWS).to(tl.int32)
    for tile in range(program, tiles_of(rows, K, ROWS, COLS), programs):
        m, k, inside = tile_at(tile, rows, K, ROWS, COLS)
        cells = (first + m // share * distance + m % share) * whole_stride + k
        if not EACH:
            value = tl.load(x + m * x_stride + k, mask=inside, other=0.0)
        for step in tl.static_range(WORLD_SIZE):
            to = (me + 1 + step) % WORLD_SIZE
            if EACH:
                value = tl.load(x + (to * rows + m) * x_stride + k, mask=inside, other=0.0)
            if step < WORLD_SIZE - 1:
                il.put(landing + cells, value, to, group, inside)
            else:
                tl.store(whole + cells, value, mask=(m < rows) & (k < whole_stride))
    arrived = il.barrier(flags + program * 2 * WORLD_SIZE, stamp, group, WORLD_SIZE).to(tl.int32)
    for step in tl.static_range(WORLD_SIZE - 1):
        source = (me + 1 + step) % WORLD_SIZE
        first = tl.load(routes + source * _ROUTE + _FIRST_ROW)
        rows = tl.load(routes + source * _ROUTE + _ROWS).to(tl.int32)
        for tile in range(program, tiles_of(rows, K, ROWS, COLS), programs):
            m, k, inside = tile_at(tile, rows, K, ROWS, COLS)
            cells = (first + m // share * distance + m % share) * whole_stride + k
            value = il.get(landing + cells, me, group, inside, 0.0)
            tl.store(whole + cells, il.nan_unless(arrived, value), mask=(m < rows) & (k < whole_stride))
    il.clear_old(flags, _PROGRAMS * 2 * WORLD_SIZE, epoch, group)
    il.advance_epoch(epochs, epoch)
