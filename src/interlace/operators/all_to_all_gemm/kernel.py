"""The kernel of ``all_to_all_gemm``; README.md explains the protocol."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.grants import (
    grant_buffer, granted_buffers, own_output, turn_of,
)
from interlace.gemm.kernels.places import FIRST_ROW, HEADER, ROUTE, ROWS_SENT, TICKETS
from interlace.gemm.kernels.tiles import Matrices, add_bias, cells_of, multiply_tile, tile_place


class ColumnPushing(NamedTuple):
    """The constants that say how columns are sent.

    Attributes:
        programs: Programs that send.
        lines, columns: The rows and columns that a program has in flight at a time.
        factor: What divides the columns that leave, their place, and the strides.
    """

    programs: Any
    lines: Any
    columns: Any
    factor: Any


class LeavingColumns(NamedTuple):
    """The columns that leave, and where they go in the rows of the owners' buffers.

    Attributes:
        x: This rank's columns of all rows.
        width: Columns.
        place: The column of a gathered row where they begin.
        stride, gathered_stride: Elements from one row to the next, here and in the buffers.
    """

    x: Any
    width: Any
    place: Any
    stride: Any
    gathered_stride: Any


@triton.jit(
    do_not_specialize=[
        "own_buffer", "y_address", "signals", "call", "per_source", "most_rows", "own_rows",
        "own_columns", "place", "cells", "N", "K", "x_stride", "gathered_stride", "w_stride",
        "y_stride",
    ]
)
def all_to_all_gemm(
    x, w, bias, gathered, buffers, own_buffer, result, y_address, signals, epochs, ctx, routes,
    call, per_source, most_rows, own_rows, own_columns, place, cells, N, K, x_stride,
    gathered_stride, w_stride, y_stride, PUSHING: tl.constexpr, SENDING: tl.constexpr,
    TILING: tl.constexpr,
):
    """Send this rank's columns to the owners of their rows, and multiply this rank's rows of all
    ranks' columns as they arrive.

    Protocol: every rank takes a free buffer for its gathered rows; program 0 *grants* it to every
    source. The first ``PUSHING.programs`` programs wait for all grants, and then go round over
    blocks of BLOCK_M rows of all ranks, first blocks first and of each block the neighbour's rows
    first: they put this rank's columns of them into the owner's buffer, at column ``place``, and
    set the signal ``[me][block]`` there. This rank's own rows go the same way. The other programs
    draw tiles of the result from a ticket counter, first blocks first: each waits for all sources'
    signals of its block of rows, and multiplies along all of K, in rank order on every rank.
    Programs that fit on the GPU only when the senders have left draw what is still there. Signals
    of blocks have one set: a source sets one again only after it was granted a buffer in a later
    call, and so after this call. Tickets have two: program 0 clears the next call's.

    No program waits but for programs of its own index or below: senders for grants, which are
    program 0's, and the others for senders.

    Example: two ranks with a row and a column each: x is [[a0], [a1]] on rank 0, [[b0], [b1]] on
    rank 1. Rank 0 puts a1 to column 0 of rank 1's buffer and a0 to its own; rank 1 puts b0 to
    column 1 of rank 0's and b1 to its own. Rank 0 multiplies [a0, b0], and rank 1 [a1, b1].

    Args:
        x: This rank's columns of all rows, a pointer; of a group of one rank, ``gathered`` is all.
        gathered: A tensor descriptor of this rank's buffer; None where it is read by address.
        buffers: An :class:`OutputBuffers`.
        result: A tensor descriptor of the result; None where it is stored by address.
        cells: Elements of the buffer, which become NaN if a peer's do not come; 0 where nobody gets
            them.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    OUT: tl.constexpr = tl.dtype(SENDING.dtype)
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    GROUP_M: tl.constexpr = TILING.group_m
    SENDERS: tl.constexpr = PUSHING.programs
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    flags = il.pointer(signals, tl.int32)
    turn = turn_of(flags, epoch, me, WORLD_SIZE)
    arrivals = flags + HEADER
    rows_of_x = x if gathered is None else gathered
    if WORLD_SIZE > 1:
        if gathered is None:
            rows_of_x = own_output(buffers, own_buffer, me, group, OUT)
        # 1. Every source learns which of this rank's buffers it may write.
        if program == 0:
            grant_buffer(turn, own_buffer, stamp, group)
        # 2. Senders bring this rank's columns to the owners of their rows.
        if program < SENDERS:
            leaving = LeavingColumns(x, own_columns, place, x_stride, gathered_stride)
            _send_columns(
                leaving, routes, buffers, arrivals, turn, own_buffer, stamp, group, me, per_source,
                most_rows, BLOCK_M, PUSHING, SENDING,
            )
    # 3. The others multiply rows whose columns have come from everywhere.
    matrices = Matrices(rows_of_x, w, N, K, gathered_stride, w_stride)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (own_rows + BLOCK_M - 1) // BLOCK_M
    tiles = tiles_m * tiles_n
    tickets = il.peer_pointer(flags + TICKETS, me, group)
    if program == 0:
        # The next call's set, which no program of this call uses.
        tl.store(il.in_turn(tickets, epoch + 1, 1), 0)
    ticket, is_multiplier = il.in_turn(tickets, epoch, 1), program >= SENDERS
    # There are draws for all tiles even if the programs that start only when the senders have left
    # draw none.
    multipliers = programs - SENDERS
    early = tl.where(multipliers > SENDERS, multipliers - SENDERS, multipliers)
    draws = tl.where(is_multiplier, (tiles + early - 1) // early, 0)
    tile = tl.atomic_add(ticket, 1, mask=is_multiplier, sem="relaxed", scope="gpu")
    for draw in range(draws):
        # The next tile is drawn before this one is computed, so that its number arrives meanwhile.
        more = (draw + 1 < draws) & (tile < tiles)
        drawn = tl.atomic_add(ticket, 1, mask=more, sem="relaxed", scope="gpu")
        if tile < tiles:
            tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
            row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
            arrived = program >= 0
            if WORLD_SIZE > 1:
                awaited = arrivals + turn.peers * per_source + tile_m
                is_source = turn.peers < WORLD_SIZE
                arrived = il.wait(awaited, stamp, turn.peers, tile_m, group, is_source)
                if TILING.descriptors:
                    # Descriptors load through another proxy than the one that the wait orders.
                    il.accept_tiles()
            il.record("tile", tile, group)
            total = multiply_tile(matrices, row, column, own_rows, TILING)
            if bias is not None:
                total = add_bias(total, bias, column, N)
            il.record("computed", tile, group)
            value = il.nan_unless(arrived.to(tl.int32), total).to(OUT)
            if SENDING.tile_stores:
                result.store([row, column], value)
            else:
                cells_of_tile, inside = cells_of(0, row, column, own_rows, N, y_stride, TILING)
                tl.store(il.pointer(y_address, OUT) + cells_of_tile, value, mask=inside)
        tile = tl.where(more, drawn, tiles)
    if WORLD_SIZE > 1:
        # 4. Who gets the gathered rows must not take others for them.
        if (program == programs - 1) & (cells > 0):
            missing = 0
            for block in range(tiles_m):
                awaited = arrivals + turn.peers * per_source + block
                is_source = turn.peers < WORLD_SIZE
                complete = il.wait(awaited, stamp, turn.peers, block, group, is_source)
                missing += 1 - complete.to(tl.int32)
            if missing > 0:
                il.fill_nan(own_output(buffers, own_buffer, me, group, OUT), cells)
        il.clear_old(arrivals, WORLD_SIZE * per_source, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit
def _send_columns(
    leaving, routes, buffers, arrivals, turn, own_buffer, stamp, group, me, per_source, most_rows,
    BLOCK_M: tl.constexpr, PUSHING: tl.constexpr, SENDING: tl.constexpr,
):
    """Put this program's share of blocks of rows into their owners' buffers, and signal each."""
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    FACTOR: tl.constexpr = PUSHING.factor
    OUT: tl.constexpr = tl.dtype(SENDING.dtype)
    granted, numbers = granted_buffers(turn, own_buffer, stamp, group)
    blocks = (most_rows + BLOCK_M - 1) // BLOCK_M
    tasks = tl.where(granted, blocks * WORLD_SIZE, 0)
    for task in range(tl.program_id(0), tasks, PUSHING.programs):
        dest = (me + 1 + task % WORLD_SIZE) % WORLD_SIZE
        block = task // WORLD_SIZE
        first = tl.load(routes + dest * ROUTE + FIRST_ROW).to(tl.int32)
        rows = tl.load(routes + dest * ROUTE + ROWS_SENT).to(tl.int32)
        if block * BLOCK_M < rows:
            number = tl.sum(tl.where(turn.peers == dest, numbers, 0))
            buffer = il.pointer(buffers.address + number.to(tl.int64) * buffers.nbytes, OUT)
            rows_of_dest = leaving.x + first.to(tl.int64) * il.multiple_of(leaving.stride, FACTOR)
            _put_rows(
                rows_of_dest, buffer + il.multiple_of(leaving.place, FACTOR), block * BLOCK_M,
                tl.minimum((block + 1) * BLOCK_M, rows), leaving, dest, group, PUSHING,
            )
            il.signal(arrivals + me * per_source + block, stamp, dest, group)


@triton.jit
def _put_rows(source, target, row, end, leaving, dest, group, PUSHING: tl.constexpr):
    """Put the columns of rows ``row`` to ``end`` of ``source`` into a peer's memory."""
    LINES: tl.constexpr = PUSHING.lines
    COLS: tl.constexpr = PUSHING.columns
    columns = il.multiple_of(leaving.width, PUSHING.factor)
    stride = il.multiple_of(leaving.stride, PUSHING.factor)
    target_stride = il.multiple_of(leaving.gathered_stride, PUSHING.factor)
    for first in range(row, end, LINES):
        m = (first + tl.arange(0, LINES)).to(tl.int64)[:, None]
        for start in range(0, columns, COLS):
            k = start + tl.arange(0, COLS)[None, :]
            inside = (m < end) & (k < columns)
            value = tl.load(source + m * stride + k, mask=inside, other=0.0)
            il.put(target + m * target_stride + k, value, dest, group, inside)
