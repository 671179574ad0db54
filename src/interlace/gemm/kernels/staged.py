"""Small kernels that move rows before a product, either together with the copies of ``fetch.py`` or
without them, or after it.

The README.md of ``all_gather_gemm`` explains the protocols.
"""

import triton
import triton.language as tl

import interlace.language as il
from interlace.mapped.kernel import tile_at, tiles_of
from interlace.gemm.kernels.lamport import end_call, memory_of
from interlace.gemm.kernels.places import (
    COUNTER, DONE, FIRST_ROW, HEADER, ROUTE, ROWS_SENT,
)
from interlace.gemm.kernels.words import agree, announce


@triton.jit
def await_fetched(flags, epoch, group, WORLD_SIZE: tl.constexpr):
    """Wait until every peer has fetched this rank's rows of the call ``epoch``; return whether all
    have.

    A peer's copies set ``[DONE]`` here behind those of the rows. One set of these signals suffices:
    a peer sets it again only after this rank has told it of its next rows, and so has waited.
    """
    peers, is_peer = il.other_ranks(il.rank(group), WORLD_SIZE)
    return il.wait(flags + DONE + peers, epoch, peers, 0, group, is_peer)


@triton.jit(
    do_not_specialize=[
        "staged_address", "scale_offset", "own_address", "signals", "call", "rows",
        "x_scale_stride", "inner_groups",
    ]
)
def stage_rows(
    x, x_scale, staged_address, scale_offset, own_address, signals, epochs, ctx, call, rows, K,
    x_stride, x_scale_stride, inner_groups, WORLD_SIZE: tl.constexpr, IN_PLACE: tl.constexpr,
    OWN: tl.constexpr, INNER_ALIGN: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, SCALES: tl.constexpr,
):
    """Copy this rank's rows to where peers may fetch them, and tell them.

    Protocol: wait until every peer has fetched the rows of the previous call
    (:func:`await_fetched`), copy, and set this rank's signal at every peer. One set of these
    signals suffices: a signal is set again only after DONE of its reader.

    With ``IN_PLACE``, peers fetch the rows from x itself: nothing is copied there, and the first
    program sets the signal at once. The kernels that wrote x came before on this stream.

    With ``OWN``, the rows are also copied to ``own_address``. ``SCALES`` is the number of scales
    that float8 rows have each.

    Example: two ranks; rank 1's third call finds 2 in the signal that rank 0 sets, copies its rows,
    and sets 3 on rank 0.
    """
    program = tl.program_id(0)
    K, x_stride = il.multiple_of(K, FACTOR), il.multiple_of(x_stride, FACTOR)
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    me = il.rank(group)
    peers, is_peer = il.other_ranks(me, WORLD_SIZE)
    flags = il.pointer(signals, tl.int32)
    K_padded = inner_groups * INNER_ALIGN
    # 1. The peers must have fetched the previous call's rows before these are overwritten.
    last = il.previous_epoch(epoch)
    free = await_fetched(flags, last, group, WORLD_SIZE).to(tl.int32)
    stamp = il.mark(epoch, call)
    if IN_PLACE:
        if (free > 0) & (program == 0):
            il.signal(flags + me + tl.zeros_like(peers), stamp, peers, group, is_peer)
    target = il.peer_pointer(il.pointer(staged_address, x.dtype.element_ty), me, group)
    # 2. Rows are copied to symmetric memory, and this rank's own share to where it is multiplied.
    # If a peer timed out, nothing is staged, since it may still be reading.
    lines, columns = tl.arange(0, ROWS), tl.arange(0, COLS)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        m = (first + lines).to(tl.int64)[:, None]
        for start in range(0, K, COLS):
            k = start + columns[None, :]
            value = tl.load(x + m * x_stride + k, mask=(m < rows) & (k < K), other=0.0)
            # Libraries read the padding beyond K as well, so it is stored as zeros.
            inside = (m < rows) & (k < K_padded)
            if OWN:
                own_target = il.pointer(own_address, x.dtype.element_ty)
                own_value = il.nan_unless(free, value)
                tl.store(own_target + m * K_padded + k, own_value, mask=inside)
            if not IN_PLACE:
                tl.store(target + m * K_padded + k, value, mask=inside & (free + m * 0 > 0))
        if x_scale is not None:
            scales = il.pointer(staged_address + scale_offset, tl.float32)
            scales = il.peer_pointer(scales, me, group)
            inside = first + lines < rows
            for block in range(SCALES):
                cell = (first + lines) * SCALES + block
                scale = tl.load(x_scale + cell * x_scale_stride, mask=inside, other=0.0)
                tl.store(scales + cell, scale, mask=inside & (free + lines * 0 > 0))
    # 3. The last program to finish tells every peer that all rows are staged.
    # If a peer timed out, nothing was staged, and a signal would make peers fetch rows of an
    # earlier call.
    if not IN_PLACE:
        if free > 0:
            counter = il.peer_pointer(flags + COUNTER, me, group)
            if il.arrive_last(counter, program, tl.num_programs(0)):
                il.signal(flags + me + tl.zeros_like(peers), stamp, peers, group, is_peer)
    il.clear_old(flags + HEADER, WORLD_SIZE, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["signals", "call"])
def await_rows(signals, ctx, notes, call, WORLD_SIZE: tl.constexpr):
    """Wait for every peer's :func:`stage_rows`: copies follow on the same stream.

    ``notes`` receives, for later kernels and copies, this call's epoch, and its stamp, or 0, which
    no call waits for, if a peer has not staged its rows in time.

    Example: two ranks; rank 1's third call ends once rank 0 has set 3 here.
    """
    group = il.join(ctx)
    me = il.rank(group)
    peers, is_peer = il.other_ranks(me, WORLD_SIZE)
    # This kernel alone counts the epoch in ``notes``; no other kernel writes it in the meantime.
    epoch = il.following_epoch(tl.load(notes))
    stamp = il.mark(epoch, call)
    arrived = il.wait(il.pointer(signals, tl.int32) + peers, stamp, peers, 0, group, is_peer)
    tl.store(notes, epoch)
    tl.store(notes + 1, stamp * arrived.to(tl.int32))


@triton.jit(do_not_specialize=["signals", "call", "cells", "results"])
def settle_rows(
    gathered, y, signals, epochs, ctx, notes, call, cells, results, WORLD_SIZE: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """Fill ``gathered`` and ``y``, of which either may be None, with NaN if a peer's rows did not
    arrive: for products that cannot check arrivals. They have ``cells`` and ``results`` elements.

    Protocol: :func:`await_rows` has written this call's stamp to ``notes`` if all rows arrived.
    The epochs are those of the operator's own kernel, if it has one: a call runs either that kernel
    or this one, and both advance them. With ``IN_PLACE`` the first program waits until every peer
    has fetched this rank's rows, which whatever runs next on the call's stream may overwrite.

    Example: rank 1 never calls; memory that no rank wrote becomes NaN on rank 0 before it is
    multiplied, or the product does behind it.
    """
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    if IN_PLACE:
        if tl.program_id(0) == 0:
            await_fetched(il.pointer(signals, tl.int32), epoch, group, WORLD_SIZE)
    if tl.load(notes + 1) != il.mark(epoch, call):
        if gathered is not None:
            il.fill_nan(gathered, cells)
        if y is not None:
            il.fill_nan(y, results)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["words", "call", "half", "cells"])
def spread_rows(
    x, gathered, words, epochs, ctx, routes, call, half, K, x_stride, gathered_stride, cells,
    WORLD_SIZE: tl.constexpr, SCATTER: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Store this rank's rows in every rank's memory, and gather what the peers store here.

    Row m of the rows that rank s sends to a rank goes to row ``routes[s] + m``. Every rank gets the
    same rows, or with ``SCATTER`` rank r gets the r-th part of x.

    Protocol: program p has the tiles p, p + programs, ... It puts them into the slots of every
    peer, and then copies the peers' tiles of the same numbers into ``gathered``, an ordinary tensor
    of ``cells`` elements. Values travel as in :func:`sum_parts`; rows that did not arrive become
    NaN. Columns of ``gathered`` beyond K become zero, since libraries that multiply it may read
    them.

    Example: two ranks with one row each, a on rank 0 and b on rank 1. Rank 0 stores a in row 0 of
    its ``gathered`` and of rank 1's slots, and copies b from row 1 of its own slots.
    """
    program, programs = tl.program_id(0), tl.num_programs(0) - 1
    K, x_stride = il.multiple_of(K, FACTOR), il.multiple_of(x_stride, FACTOR)
    gathered_stride = il.multiple_of(gathered_stride, FACTOR)
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    calls, slots = memory_of(words, half, epoch, x.dtype.element_ty)
    if program == programs:
        announce(calls, stamp, group, WORLD_SIZE)
        if agree(calls, stamp, group, WORLD_SIZE) == 0:
            il.fill_nan(gathered, cells)
    else:
        first = tl.load(routes + me * ROUTE + FIRST_ROW)
        rows = tl.load(routes + me * ROUTE + ROWS_SENT).to(tl.int32)
        # 1. Store this rank's rows at every rank, the neighbour first, so that ranks do not all
        # send to the same peer at a time.
        for tile in range(program, tiles_of(rows, K, ROWS, COLS), programs):
            m, k, inside = tile_at(tile, rows, K, ROWS, COLS)
            place = (first + m) * gathered_stride + k
            if not SCATTER:
                value = tl.load(x + m * x_stride + k, mask=inside, other=0.0)
            for step in tl.static_range(WORLD_SIZE):
                to = (me + 1 + step) % WORLD_SIZE
                if SCATTER:
                    value = tl.load(x + (to * rows + m) * x_stride + k, mask=inside, other=0.0)
                if step < WORLD_SIZE - 1:
                    il.put_lamport(slots + place, value, to, group, inside)
                else:
                    tl.store(gathered + place, value, mask=(m < rows) & (k < gathered_stride))
        # 2. Copy the peers' rows out of the slots, in the order in which they were sent.
        for step in tl.static_range(WORLD_SIZE - 1):
            source = (me + WORLD_SIZE - 1 - step) % WORLD_SIZE
            first = tl.load(routes + source * ROUTE + FIRST_ROW)
            rows = tl.load(routes + source * ROUTE + ROWS_SENT).to(tl.int32)
            for tile in range(program, tiles_of(rows, K, ROWS, COLS), programs):
                m, k, inside = tile_at(tile, rows, K, ROWS, COLS)
                place = (first + m) * gathered_stride + k
                value = il.get_lamport(slots + place, stamp, source, tile, group, inside)
                value = value.to(gathered.dtype.element_ty)
                tl.store(gathered + place, value, mask=(m < rows) & (k < gathered_stride))
    end_call(words, half, epochs, epoch, group)
