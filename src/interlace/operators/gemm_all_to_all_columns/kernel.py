"""The kernel of ``gemm_all_to_all_columns``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.grants import (
    await_senders, end_sending, grant_buffer, granted_buffers, own_output, turn_of,
)
from interlace.gemm.kernels.tiles import (
    Matrices, add_bias, multiply_tile, start_in_turn, tile_place,
)
from interlace.operators.gemm_all_to_all_columns.layout import COUNT, FIRST_COLUMN, TARGETS

_FIRST_COLUMN = tl.constexpr(FIRST_COLUMN)
_COUNT = tl.constexpr(COUNT)
_TARGETS = tl.constexpr(TARGETS)


@triton.jit(
    do_not_specialize=[
        "own_buffer", "signals", "call", "rows", "first_row", "part_rows", "own_cells", "tiles_n",
        "N", "K", "x_stride", "w_stride", "spread_ns",
    ]
)
def gemm_all_to_all_columns(
    x, w, bias, tiles, buffers, own_buffer, signals, epochs, ctx, columns, strides, call, rows,
    first_row, part_rows, own_cells, tiles_n, N, K, x_stride, w_stride, spread_ns,
    OWNERS: tl.constexpr, FACTOR: tl.constexpr, SENDING: tl.constexpr, TILING: tl.constexpr,
):
    """Multiply, tile by tile, each tile straight into the results of the ranks that own its
    columns.

    Protocol: as of ``gemm_all_to_all``. Every rank takes a free buffer for its result; program 0
    *grants* it to every source. Once all grants are here, programs go round over tiles, which are
    ordered so that neighbouring columns of tiles are of different ranks; a tile is put into the
    buffer of every rank that gets its columns, and its copy runs while the next tile is computed.
    The last program to have sent all its tiles signals every peer. The program of the highest index
    waits, last of all, until all sources are done. No rank writes to a granted buffer after that.
    All signals have two sets.

    ``columns`` has ``tiles_n`` columns of tiles, int64: where each begins in w, how many columns it
    has, and ``OWNERS`` pairs of a rank that gets them, or -1, and the place where they begin in
    that rank's result. ``strides`` has the
    elements between two rows of each rank's result. With tile stores, ``tiles`` describes ``[rank,
    buffer, part, row, column]``, with ``part_rows`` rows in each part of a result.

    Example: two ranks with a row each, a on rank 0 and b on rank 1; w has two rows, of which the
    second one's column is rank 0's. Rank 0 puts a @ w[1] to column 0 of row 0 of its own result,
    and a @ w[0] to row 0 of rank 1's; rank 1 puts b @ w[1] to row 1 of rank 0's, and b @ w[0] to
    row 1 of its own. Results: [[a @ w[1]], [b @ w[1]]] and [[a @ w[0]], [b @ w[0]]].

    Args:
        buffers: An :class:`OutputBuffers`.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    OUT: tl.constexpr = tl.dtype(SENDING.dtype)
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    GROUP_M: tl.constexpr = TILING.group_m
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    flags = il.pointer(signals, tl.int32)
    turn = turn_of(flags, epoch, me, WORLD_SIZE)
    number = own_buffer + tl.zeros_like(turn.peers)
    granted = program >= 0
    if WORLD_SIZE > 1:
        # 1. Every source learns which of this rank's buffers it may write.
        if program == 0:
            grant_buffer(turn, own_buffer, stamp, group)
        if spread_ns > 0:
            start_in_turn(spread_ns)
        granted, number = granted_buffers(turn, own_buffer, stamp, group)
    matrices = Matrices(x, w, N, K, x_stride, w_stride)
    tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
    # 2. Each tile goes straight to its place in the buffers of its columns' owners.
    for task in tl.range(program, tl.where(granted, tiles_m * tiles_n, 0), programs):
        tile_m, tile_n = tile_place(task, tiles_m, tiles_n, GROUP_M)
        entry = columns + tile_n * (_TARGETS + 2 * OWNERS)
        column = tl.load(entry + _FIRST_COLUMN).to(tl.int32)
        count = il.multiple_of(tl.load(entry + _COUNT).to(tl.int32), FACTOR)
        row = tile_m * BLOCK_M
        il.record("tile", task, group)
        total = multiply_tile(matrices, row, column, rows, TILING)
        if bias is not None:
            total = add_bias(total, bias, column, N)
        il.record("computed", task, group)
        value = total.to(OUT)
        # Unrolled: the copy of a tile that leaves in a loop of its own would have to end before the
        # next tile.
        for owner in tl.static_range(OWNERS):
            dest = tl.load(entry + _TARGETS + 2 * owner).to(tl.int32)
            place = tl.load(entry + _TARGETS + 2 * owner + 1).to(tl.int32)
            place = il.multiple_of(place, FACTOR)
            if dest >= 0:
                buffer = tl.sum(tl.where(turn.peers == dest, number, 0))
                if SENDING.tile_stores:
                    # The part of the result leaves out what a tile has beyond this rank's rows.
                    part, line = first_row // part_rows, first_row % part_rows + row
                    block = tl.reshape(value, [1, 1, 1, BLOCK_M, BLOCK_N])
                    il.put_tile(tiles, [dest, buffer, part, line, place], block, group)
                else:
                    target = il.pointer(buffers.address + buffer.to(tl.int64) * buffers.nbytes, OUT)
                    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
                    stride = il.multiple_of(tl.load(strides + dest), FACTOR)
                    lines = (first_row + row + m).to(tl.int64) * stride
                    inside = (row + m < rows)[:, None] & (n < count)[None, :]
                    il.put(target + lines[:, None] + (place + n)[None, :], value, dest, group, inside)
    if WORLD_SIZE > 1:
        if SENDING.tile_stores:
            il.complete_tiles()
        # 3. The last program to have sent all its tiles tells every peer.
        if granted:
            end_sending(turn, flags, stamp, group)
        # 4. This rank's buffer is whole once all sources have said so.
        if program == programs - 1:
            complete = await_senders(turn, stamp, group)
            arrived = granted & complete
            if not arrived:
                il.fill_nan(own_output(buffers, own_buffer, me, group, OUT), own_cells)
    il.advance_epoch(epochs, epoch)
