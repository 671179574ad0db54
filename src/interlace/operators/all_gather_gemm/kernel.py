"""The kernels of ``all_gather_gemm``; README.md explains the protocol."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.places import FIRST_ROW, HEADER, ROUTE, ROWS_SENT
from interlace.gemm.kernels.staged import await_fetched
from interlace.gemm.kernels.tiles import (
    Matrices, Scales, cells_of, finish_tile, multiply_tile, padded_stride, tile_place,
)


class GatheredOutput(NamedTuple):
    """The result ``[M, N]``.

    Attributes:
        tiles: A tensor descriptor of it, ``[part, row, column]``, or None.
        part_rows: Rows of each of these parts.
        address: Its address.
        row_stride: Elements between two rows.
    """

    tiles: Any
    part_rows: Any
    address: Any
    row_stride: Any


class Arrivals(NamedTuple):
    """The rows of each rank, the signals that say that they have arrived, and their stamp."""

    routes: Any
    flags: Any
    stamp: Any
    most_rows: Any


@triton.jit
def _multiply(
    start, end, matrices, scales, bias, output, arrivals, group, OWN: tl.constexpr,
    SENDING: tl.constexpr, TILING: tl.constexpr,
):
    """Multiply every tile of this program from ``start`` to ``end``: of this rank's own x
    (``OWN``), or of the gathered one, each after its source's rows have come.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    OUT: tl.constexpr = tl.dtype(SENDING.dtype)
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    GROUP_M: tl.constexpr = TILING.group_m
    me = il.rank(group)
    N, routes = matrices.N, arrivals.routes
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (arrivals.most_rows + BLOCK_M - 1) // BLOCK_M
    tiles_per_rank = tiles_m * tiles_n
    all_arrived = 1
    # Loaded when the source changes: a tile that begins with a trip to memory begins a microsecond
    # later.
    known_source = me
    first = tl.load(routes + me * ROUTE + FIRST_ROW).to(tl.int32)
    rows = tl.load(routes + me * ROUTE + ROWS_SENT).to(tl.int32)
    for task in tl.range(start, end, tl.num_programs(0)):
        source = (me + task // tiles_per_rank) % WORLD_SIZE
        tile_m, tile_n = tile_place(task % tiles_per_rank, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        if not OWN:
            if source != known_source:
                known_source = source
                first = tl.load(routes + source * ROUTE + FIRST_ROW).to(tl.int32)
                rows = tl.load(routes + source * ROUTE + ROWS_SENT).to(tl.int32)
                lanes = tl.arange(0, 1)
                awaited = arrivals.flags + HEADER + source + lanes
                has_rows = rows + lanes > 0
                # A copy sets this signal, behind the copy of the rows on the same stream, so the
                # rows are in memory when the signal is.
                complete = il.wait(awaited, arrivals.stamp, source + lanes, 0, group, has_rows)
                all_arrived = all_arrived * complete.to(tl.int32)
                if TILING.descriptors:
                    # Descriptors load through another proxy than the one that the wait orders.
                    il.accept_tiles()
        if row < rows:
            x_row = row if OWN else first + row
            x_rows = rows if OWN else first + rows
            il.record("tile", task, group)
            total = multiply_tile(matrices, x_row, column, x_rows, TILING, scales=scales)
            total = finish_tile(total, scales, bias, x_row, column, x_rows, N, TILING)
            il.record("computed", task, group)
            if not OWN:
                # A failed wait breaks the group, so later sources count as missing, too.
                total = il.nan_unless(all_arrived, total)
            value = total.to(OUT)
            if SENDING.tile_stores:
                # The part leaves out what a tile has beyond its source's rows.
                part, line = first // output.part_rows, first % output.part_rows + row
                output.tiles.store([part, line, column], tl.reshape(value, [1, BLOCK_M, BLOCK_N]))
            else:
                cells, inside = cells_of(
                    first, row, column, rows, N, output.row_stride, TILING
                )
                tl.store(il.pointer(output.address, OUT) + cells, value, mask=inside)


@triton.jit(
    do_not_specialize=[
        "y_address", "signals", "call", "most_rows", "part_rows", "N", "K", "x_stride", "w_stride",
        "cells",
    ]
)
def all_gather_gemm(
    x, w, bias, scales, gathered, gathered_scales, filled, result, y_address, signals, epochs, ctx,
    routes, call, most_rows, part_rows, N, K, x_stride, w_stride, cells, INNER_ALIGN: tl.constexpr,
    IN_PLACE: tl.constexpr, SENDING: tl.constexpr, TILING: tl.constexpr,
):
    """Multiply all ranks' rows, this rank's own first, while copy engines fetch the others.

    Protocol: programs go round over tiles: of this rank's own rows, straight from x; then of the
    neighbour's and so on, each after its source's signal, which a copy sets behind the rows
    themselves. The last program checks that all rows have come, and with ``IN_PLACE`` waits until
    every peer has fetched this rank's, as what runs next may write others there.

    Example: two ranks with one row each, a on rank 0 and b on rank 1. Rank 0 computes a @ w0.T and,
    once b is in row 1 of its gathered x, b @ w0.T.

    Args:
        scales: A :class:`Scales`, of this rank's own rows.
        gathered: The rows of all ranks, as x is passed, with rows padded to ``INNER_ALIGN``.
        gathered_scales: The float32 scales of gathered rows, one for each, or for each of its
            blocks; None where ``scales`` are.
        filled: The gathered rows as a pointer, of which ``cells`` elements become NaN if a peer's
            do not come; None where nobody gets them.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    flags = il.pointer(signals, tl.int32)
    arrivals = Arrivals(routes, flags, il.mark(epoch, call), most_rows)
    output = GatheredOutput(result, part_rows, y_address, padded_stride(N, SENDING.align))
    tiles_m, tiles_n = (most_rows + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N
    tiles_per_rank = tiles_m * tiles_n
    # This rank's own rows are read where they are, and the others' where they arrive: two loops,
    # one after the other, since two in the branches of one would need the shared memory of both.
    own_matrices = Matrices(x, w, N, K, x_stride, w_stride)
    _multiply(
        program, tiles_per_rank, own_matrices, scales, bias, output, arrivals, group,
        True, SENDING, TILING,
    )
    if WORLD_SIZE > 1:
        # Programs go on where the round over this rank's own tiles ended.
        rounds = tl.maximum(tiles_per_rank - program + programs - 1, 0) // programs
        gathered_matrices = Matrices(
            gathered, w, N, K, padded_stride(K, INNER_ALIGN), w_stride
        )
        scales_of_gathered = Scales(gathered_scales, scales.w_scale, 1, scales.w_stride)
        _multiply(
            program + rounds * programs, tiles_per_rank * WORLD_SIZE, gathered_matrices,
            scales_of_gathered, bias, output, arrivals, group, False, SENDING, TILING,
        )
        if program == programs - 1:
            if filled is not None:
                peers, is_peer = il.other_ranks(il.rank(group), WORLD_SIZE)
                routes_of = routes + peers * ROUTE + ROWS_SENT
                is_sent = is_peer & (tl.load(routes_of, mask=is_peer, other=0) > 0)
                stamp = arrivals.stamp
                complete = il.wait(flags + HEADER + peers, stamp, peers, 0, group, is_sent)
                if complete.to(tl.int32) == 0:
                    il.fill_nan(filled, cells)
            if IN_PLACE:
                await_fetched(flags, epoch, group, WORLD_SIZE)
    il.advance_epoch(epochs, epoch)
