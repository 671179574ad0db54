"""A product that stays on this GPU and counts its tiles, for copies that wait for them."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.tiles import add_bias, multiply_tile, scale_tile, tile_place


@triton.jit(
    do_not_specialize=[
        "y_address", "counters_address", "me", "pieces", "rows", "N", "K", "x_stride", "w_stride",
        "x_scale_stride", "w_scale_stride", "part_stride", "y_stride",
    ]
)
def counted_product(
    x, w, bias, x_scale, w_scale, tiles, y_address, counters_address, me, pieces, rows, N, K,
    x_stride, w_stride, x_scale_stride, w_scale_stride, part_stride, y_stride,
    WORLD_SIZE: tl.constexpr, OUT: tl.constexpr, DESCRIPTORS: tl.constexpr, TILES: tl.constexpr,
    OWN_BIAS: tl.constexpr, W_ALONG_K: tl.constexpr, PRECISION: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``x @ w.T``, the rows for the next rank first, this rank's own last; a tile that is stored is
    counted.

    Protocol: rows are in pieces of ``rows``, ``pieces`` for each rank; a tile of piece p adds 1 to
    counter p. Tiles' copies out of shared memory run while the next one is computed: a tile is
    counted then.

    Args:
        tiles: a tensor descriptor of the output, ``[rank, row, column]``; with ``TILES``, for which
            a tile must not reach into the next piece of the same rank.
        part_stride, y_stride: elements between the parts for two ranks, and between two rows.
        bias: added to all rows, or with ``OWN_BIAS`` to this rank's own (of a sum over ranks,
            once).

    Example: two ranks, one piece of two rows each, tiles of one row: rank 0 computes rows 2 and 3,
    counter 1 comes to 2, and the copy of both to rank 1 begins; then rows 0 and 1.
    """
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
    each = tiles_m * tiles_n
    counters = il.pointer(counters_address, tl.int32)
    uncounted = -1  # the piece of the tile that was stored last
    for task in tl.range(tl.program_id(0), each * WORLD_SIZE * pieces, tl.num_programs(0)):
        turn = task // each
        dest = (me + 1 + turn // pieces) % WORLD_SIZE
        piece = dest * pieces + turn % pieces
        first = piece * rows  # of x
        place = turn % pieces * rows  # of the part
        tile_m, tile_n = tile_place(task % each, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = multiply_tile(
            x, w, first + row, column, first + rows, N, K, x_stride, w_stride,
            DESCRIPTORS, W_ALONG_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if x_scale is not None:
            total = scale_tile(total, x_scale, w_scale, first + row, column, first + rows, N, x_scale_stride, w_scale_stride)
        if bias is not None:
            if (not OWN_BIAS) or (dest == me):
                total = add_bias(total, bias, column, N)
        if uncounted >= 0:
            if TILES:
                il.complete_tiles()
            il.count(counters + uncounted)
        value = total.to(OUT)
        if TILES:
            tiles.store([dest, place + row, column], tl.reshape(value, [1, BLOCK_M, BLOCK_N]))
        else:
            m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            cells = (place + m).to(tl.int64)[:, None] * y_stride + n[None, :]
            part = il.pointer(y_address, OUT) + dest * part_stride.to(tl.int64)
            tl.store(part + cells, value, mask=(m < rows)[:, None] & (n < N)[None, :])
        uncounted = piece
    if uncounted >= 0:
        if TILES:
            il.complete_tiles()
        il.count(counters + uncounted)
