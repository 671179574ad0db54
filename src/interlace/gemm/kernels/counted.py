"""A product that stays on this GPU and counts its tiles, for copies that wait for them."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.tiles import (
    Matrices, Scales, add_bias, cells_of, multiply_tile, scale_tile, tile_place,
)


@triton.jit(
    do_not_specialize=[
        "y_address", "counters_address", "me", "pieces", "rows", "N", "K", "x_stride", "w_stride",
        "x_scale_stride", "w_scale_stride", "part_stride", "y_stride",
    ]
)
def counted_product(
    x, w, bias, x_scale, w_scale, tiles, y_address, counters_address, me, pieces, rows, N, K,
    x_stride, w_stride, x_scale_stride, w_scale_stride, part_stride, y_stride,
    OWN_BIAS: tl.constexpr, SENDING: tl.constexpr, TILING: tl.constexpr,
):
    """Multiply ``x @ w.T``, the rows for the next rank first, this rank's own last, and count each
    tile that is stored.

    Protocol: rows are in pieces of ``rows``, ``pieces`` for each rank; a tile of piece p adds 1 to
    counter p, for which copies wait. Tiles' copies out of shared memory run while the next tile is
    computed, so a tile is counted one tile later.

    Args:
        tiles: A tensor descriptor of the output, ``[rank, row, column]``, with
            ``SENDING.tile_stores``; a tile must not reach into the next piece of the same rank.
        part_stride, y_stride: Elements between the parts for two ranks, and between two rows.
        bias: Added to all rows, or with ``OWN_BIAS`` to this rank's own (of a sum over ranks,
            once).

    Example: two ranks, one piece of two rows each, tiles of one row: rank 0 computes rows 2 and 3,
    counter 1 comes to 2, and the copy of both to rank 1 begins; then rows 0 and 1.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    OUT: tl.constexpr = SENDING.dtype
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    GROUP_M: tl.constexpr = TILING.group_m
    matrices = Matrices(x, w, N, K, x_stride, w_stride)
    scales = Scales(x_scale, w_scale, x_scale_stride, w_scale_stride)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
    # A piece is what one copy takes, so tiles do not reach from one piece into the next.
    tiles_per_piece = tiles_m * tiles_n
    tasks = tiles_per_piece * WORLD_SIZE * pieces
    counters = il.pointer(counters_address, tl.int32)
    uncounted = -1  # the piece of the tile that was stored last
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0)):
        turn = task // tiles_per_piece
        # The neighbour's rows come first and this rank's own rows last, so that the copies of all
        # other parts are hidden behind products.
        dest = (me + 1 + turn // pieces) % WORLD_SIZE
        piece = dest * pieces + turn % pieces
        first = piece * rows  # of x
        offset = turn % pieces * rows  # of the part
        tile_m, tile_n = tile_place(task % tiles_per_piece, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = multiply_tile(matrices, first + row, column, first + rows, TILING)
        if x_scale is not None:
            total = scale_tile(total, scales, first + row, column, first + rows, N)
        if bias is not None:
            # In a sum over ranks every rank computes a part of each row; the bias is added once.
            if (not OWN_BIAS) or (dest == me):
                total = add_bias(total, bias, column, N)
        # The tile before this one has left shared memory while this one was computed.
        if uncounted >= 0:
            if SENDING.tile_stores:
                il.complete_tiles()
            il.count(counters + uncounted)
        value = total.to(OUT)
        if SENDING.tile_stores:
            tiles.store([dest, offset + row, column], tl.reshape(value, [1, BLOCK_M, BLOCK_N]))
        else:
            cells, inside = cells_of(offset, row, column, rows, N, y_stride, TILING)
            part = il.pointer(y_address, OUT) + dest * part_stride.to(tl.int64)
            tl.store(part + cells, value, mask=inside)
        uncounted = piece
    if uncounted >= 0:
        if SENDING.tile_stores:
            il.complete_tiles()
        il.count(counters + uncounted)
