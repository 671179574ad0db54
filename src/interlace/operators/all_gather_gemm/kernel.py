"""The kernels of ``all_gather_gemm``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels import layout
from interlace.gemm.kernels.tiles import add_bias, multiply_tile, scale_tile, tile_place

_HEADER = tl.constexpr(layout.HEADER)
_FIRST_ROW = tl.constexpr(layout.FIRST_ROW)
_ROWS = tl.constexpr(layout.ROWS)
_ROUTE = tl.constexpr(layout.ROUTE)


@triton.jit
def _multiply(
    start, end, x, w, bias, x_scale, w_scale, result, y_address, routes, flags, stamp, group,
    most_rows, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, row_stride, each,
    OWN: tl.constexpr, WORLD_SIZE: tl.constexpr, OUT: tl.constexpr, DESCRIPTORS: tl.constexpr,
    TILES: tl.constexpr, W_ALONG_K: tl.constexpr, PRECISION: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Every tile of this program from ``start`` to ``end``: of this rank's own x (``OWN``), or of
    the gathered one, each after its source's rows have come.
    """
    me = il.rank(group)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (most_rows + BLOCK_M - 1) // BLOCK_M
    arrived = 1
    # Loaded when the source changes: a tile that begins with a trip to memory begins a microsecond
    # later.
    known_source = me
    first = tl.load(routes + me * _ROUTE + _FIRST_ROW).to(tl.int32)
    rows = tl.load(routes + me * _ROUTE + _ROWS).to(tl.int32)
    for task in tl.range(start, end, tl.num_programs(0)):
        source = (me + task // each) % WORLD_SIZE
        tile_m, tile_n = tile_place(task % each, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        if not OWN:
            if source != known_source:
                known_source = source
                first = tl.load(routes + source * _ROUTE + _FIRST_ROW).to(tl.int32)
                rows = tl.load(routes + source * _ROUTE + _ROWS).to(tl.int32)
                lanes = tl.arange(0, 1)
                complete = il.wait(flags + _HEADER + source + lanes, stamp, source + lanes, 0, group, rows + lanes > 0)
                arrived = arrived * complete.to(tl.int32)
                if DESCRIPTORS:
                    il.accept_tiles()
        if row < rows:
            x_row = row if OWN else first + row
            x_rows = rows if OWN else first + rows
            total = multiply_tile(
                x, w, x_row, column, x_rows, N, K, x_stride, w_stride,
                DESCRIPTORS, W_ALONG_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if x_scale is not None:
                total = scale_tile(total, x_scale, w_scale, x_row, column, x_rows, N, x_scale_stride, w_scale_stride)
            if bias is not None:
                total = add_bias(total, bias, column, N)
            m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            value = total.to(OUT) if OWN else tl.where((arrived + m * 0 > 0)[:, None], total, float("nan")).to(OUT)
            if TILES:
                result.store([first + row, column], value)
            else:
                cells = (first + m).to(tl.int64)[:, None] * row_stride + n[None, :]
                tl.store(il.pointer(y_address, OUT) + cells, value, mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit(
    do_not_specialize=[
        "y_address", "signals", "call", "most_rows", "N", "K", "x_stride", "w_stride",
        "x_scale_stride", "w_scale_stride", "row_groups", "inner_groups",
    ]
)
def all_gather_gemm(
    x, w, bias, x_scale, w_scale, scales, whole, result, y_address, signals, epochs, ctx, routes,
    call, most_rows, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, row_groups,
    inner_groups, WORLD_SIZE: tl.constexpr, OUT: tl.constexpr, DESCRIPTORS: tl.constexpr,
    TILES: tl.constexpr, W_ALONG_K: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    INNER_ALIGN: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply all ranks' rows, this rank's own first, while copy engines fetch the others.

    Protocol: programs go round over tiles: of this rank's own rows, straight from x; then of the
    neighbour's and so on, each after its source's signal, which a copy sets behind the rows
    themselves.

    Example: two ranks with one row each, a on rank 0 and b on rank 1. Rank 0 computes a @ w0.T and,
    once b is in row 1 of its gathered x, b @ w0.T.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    flags = il.pointer(signals, tl.int32)
    row_stride, K_padded = row_groups * ALIGN, inner_groups * INNER_ALIGN
    each = ((most_rows + BLOCK_M - 1) // BLOCK_M) * ((N + BLOCK_N - 1) // BLOCK_N)
    # This rank's own rows are read where they are, and the others' where they arrive: two loops,
    # one after the other, since two in the branches of one would need the shared memory of both.
    _multiply(
        program, each, x, w, bias, x_scale, w_scale, result, y_address, routes, flags, stamp, group,
        most_rows, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, row_stride, each, True,
        WORLD_SIZE, OUT, DESCRIPTORS, TILES, W_ALONG_K, PRECISION, GROUP_M, BLOCK_M, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip
    if WORLD_SIZE > 1:
        following = program + tl.maximum(each - program + programs - 1, 0) // programs * programs
        _multiply(
            following, each * WORLD_SIZE, whole, w, bias, scales, w_scale, result, y_address,
            routes, flags, stamp, group, most_rows, N, K, K_padded, w_stride, 1, w_scale_stride,
            row_stride, each, False, WORLD_SIZE, OUT, DESCRIPTORS, TILES, W_ALONG_K, PRECISION,
            GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    il.advance_epoch(epochs, epoch)
