"""The kernel of ``gemm_all_to_all``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.grants import (
    await_senders, end_sending, grant_buffer, granted_buffers, own_output, turn_of,
)
from interlace.gemm.kernels.places import FIRST_ROW, PLACE, ROUTE, ROWS_SENT
from interlace.gemm.kernels.tiles import (
    Matrices, cells_of, finish_tile, multiply_tile, padded_stride, start_in_turn, tile_place,
)


@triton.jit(
    do_not_specialize=[
        "own_buffer", "signals", "call", "most_rows", "own_rows", "part_rows", "N", "K",
        "x_stride", "w_stride", "spread_ns",
    ]
)
def gemm_all_to_all(
    x, w, bias, scales, tiles, buffers, own_buffer, signals, epochs, ctx, routes, call, most_rows,
    own_rows, part_rows, N, K, x_stride, w_stride, spread_ns, SENDING: tl.constexpr,
    TILING: tl.constexpr,
):
    """Multiply, tile by tile, each tile straight into its place in its owner's output.

    Protocol: every rank takes a free buffer for its output; program 0 *grants* it to every source:
    puts the buffer's number into ``GRANTS[me]`` there and signals. So a rank that is not in this
    call yet receives nothing. Once all grants are here, programs go round over tiles,
    ``INTERLEAVE`` for one destination and then for the next, from the neighbour on, this rank being
    the last: links are busy from beginning to end, and no rank's are congested. A tile's copy runs
    while the next tile is computed. The last program to have sent all its tiles signals every
    destination. The program of the highest index waits, last of all, until all sources are done. No
    rank writes to a granted buffer after that. All signals have two sets.

    No program waits for a program that waits, except for program 0's grants, which are sent first.

    With tile stores, ``tiles`` describes ``[rank, buffer, part, row, column]``, with ``part_rows``
    rows in each part of an output.

    Example: two ranks, two rows each, split evenly: products [a0, a1] on rank 0 and [b0, b1] on
    rank 1. Rank 0 writes a1 to row 0 of rank 1's output, then a0 to row 0 of its own; rank 1 writes
    b0 to row 1 of rank 0's, then b1 to row 1 of its own. Outputs: [a0, b0] and [a1, b1].

    Args:
        scales: A :class:`Scales`.
        buffers: An :class:`OutputBuffers`.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    OUT: tl.constexpr = tl.dtype(SENDING.dtype)
    INTERLEAVE: tl.constexpr = SENDING.interleave
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    GROUP_M: tl.constexpr = TILING.group_m
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    flags = il.pointer(signals, tl.int32)
    turn = turn_of(flags, epoch, me, WORLD_SIZE)
    row_stride = padded_stride(N, SENDING.align)
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
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (most_rows + BLOCK_M - 1) // BLOCK_M
    # Whole turns of INTERLEAVE tiles for each rank; tiles beyond the last are skipped.
    tasks = (tiles_m * tiles_n + INTERLEAVE - 1) // INTERLEAVE * INTERLEAVE
    # 2. Each tile goes straight to its place in its owner's buffer.
    for task in tl.range(program, tl.where(granted, tasks * WORLD_SIZE, 0), programs):
        dest = (me + 1 + task // INTERLEAVE % WORLD_SIZE) % WORLD_SIZE
        tile = task // (INTERLEAVE * WORLD_SIZE) * INTERLEAVE + task % INTERLEAVE
        first = tl.load(routes + dest * ROUTE + FIRST_ROW).to(tl.int32)
        rows = tl.load(routes + dest * ROUTE + ROWS_SENT).to(tl.int32)
        offset = tl.load(routes + dest * ROUTE + PLACE).to(tl.int32)
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        if (row < rows) & (column < N):
            il.record("tile", tile, group)
            x_row, x_rows = first + row, first + rows
            total = multiply_tile(matrices, x_row, column, x_rows, TILING, scales=scales)
            total = finish_tile(total, scales, bias, x_row, column, x_rows, N, TILING)
            il.record("computed", tile, group)
            value = total.to(OUT)
            buffer = tl.sum(tl.where(turn.peers == dest, number, 0))
            if SENDING.tile_stores:
                # The part of the output leaves out what a tile has beyond this source's rows.
                part, line = offset // part_rows, offset % part_rows + row
                block = tl.reshape(value, [1, 1, 1, BLOCK_M, BLOCK_N])
                il.put_tile(tiles, [dest, buffer, part, line, column], block, group)
            else:
                target = il.pointer(buffers.address + buffer.to(tl.int64) * buffers.nbytes, OUT)
                cells, inside = cells_of(offset, row, column, rows, N, row_stride, TILING)
                il.put(target + cells, value, dest, group, inside)
    if WORLD_SIZE > 1:
        if SENDING.tile_stores:
            il.complete_tiles()
        # 3. The last program to have sent all its tiles tells every destination.
        if granted:
            end_sending(turn, flags, stamp, group)
        # 4. This rank's buffer is whole once all sources have said so.
        if program == programs - 1:
            complete = await_senders(turn, stamp, group)
            arrived = granted & complete
            if not arrived:
                output = own_output(buffers, own_buffer, me, group, OUT)
                il.fill_nan(output, own_rows.to(tl.int64) * row_stride)
    il.advance_epoch(epochs, epoch)
