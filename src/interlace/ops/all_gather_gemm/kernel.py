"""The kernel of ``all_gather_gemm``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.products import record
from interlace.products.kernel import add_bias, multiply_tile, scale_tile, tile_place

_COUNTER = tl.constexpr(record.COUNTER)
_TICKETS = tl.constexpr(record.TICKETS)
_DONE = tl.constexpr(record.DONE)
_GRANTS = tl.constexpr(record.GRANTS)
_HEADER = tl.constexpr(record.HEADER)
_FIRST_ROW = tl.constexpr(record.FIRST_ROW)
_ROWS = tl.constexpr(record.ROWS)
_ROUTE = tl.constexpr(record.ROUTE)
_LOOK = tl.constexpr(16)  # blocks of rows awaited together
_TURN = tl.constexpr(32)  # tickets between two looks at whether there are any left


@triton.jit
def _push(
    x, x_scale, gathered, gathered_address, buffers, buffer_bytes, scale_offset, flags, counters, stamp, group, first, rows, K, x_stride,
    x_scale_stride, K_padded, PUSHERS,
    WORLD_SIZE: tl.constexpr, GATHER: tl.constexpr, MEMBERS: tl.constexpr, DESCRIPTORS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Put this rank's rows in every peer's gathered x, block of rows by block, and tell when a block is complete.

    ``MEMBERS`` programs share in a block. With ``GATHER`` this rank's own gathered x gets them too.
    """
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    blocks = (rows + BLOCK_M - 1) // BLOCK_M
    pieces = (K + BLOCK_K - 1) // BLOCK_K
    share = (pieces + MEMBERS - 1) // MEMBERS
    lines = tl.arange(0, BLOCK_M)
    for task in range(tl.program_id(0), blocks * MEMBERS, PUSHERS):
        block, member = task // MEMBERS, task % MEMBERS
        row = block * BLOCK_M
        m = row + lines
        for piece in range(member * share, tl.minimum((member + 1) * share, pieces)):
            k = piece * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = (m < rows)[:, None] & (k < K)[None, :]
            if DESCRIPTORS:
                value = x.load([row, piece * BLOCK_K])
            else:
                value = tl.load(x + m.to(tl.int64)[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
            for step in tl.static_range(1, WORLD_SIZE + GATHER):
                peer = (me + step) % WORLD_SIZE
                buffer = tl.sum(tl.where(peers == peer, buffers, 0))
                if TILES:
                    il.put_tile(gathered, [peer, buffer, first + row, piece * BLOCK_K], tl.reshape(value, [1, 1, BLOCK_M, BLOCK_K]))
                else:
                    target = il.pointer(gathered_address + buffer.to(tl.int64) * buffer_bytes, value.dtype)
                    cells = target + (first + m).to(tl.int64)[:, None] * K_padded + k[None, :]
                    il.put(cells, value, peer, group, inside)
        if x_scale is not None:
            if member == 0:
                scale = tl.load(x_scale + m * x_scale_stride, mask=m < rows, other=0.0)
                for step in tl.static_range(1, WORLD_SIZE):
                    peer = (me + step) % WORLD_SIZE
                    buffer = tl.sum(tl.where(peers == peer, buffers, 0))
                    scales = il.pointer(gathered_address + buffer.to(tl.int64) * buffer_bytes + scale_offset, tl.float32)
                    il.put(scales + first + m, scale, peer, group, m < rows)
        if TILES:
            il.complete_tiles()
        if il.arrive_last(il.peer_pointer(counters + block, me, group), member, MEMBERS):
            il.signal(flags + block + tl.zeros_like(peers), stamp, peers, group, others)


@triton.jit
def _multiply(
    ticket, end, tickets, x, w, bias, x_scale, w_scale, result, y_address, routes, flags, per_source, stamp, group, most_rows,
    N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, row_stride, each,
    OWN: tl.constexpr, WORLD_SIZE: tl.constexpr, OUT: tl.constexpr, DESCRIPTORS: tl.constexpr, TILES: tl.constexpr,
    W_ALONG_K: tl.constexpr, PRECISION: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tiles from ``ticket`` to ``end``: of this rank's own x (``OWN``), or of the gathered one, each after its block has come.

    Returns:
        This program's next ticket, ``end`` or later.
    """
    me = il.rank(group)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (most_rows + BLOCK_M - 1) // BLOCK_M
    known_source = -1
    known_blocks = 0
    arrived = 1
    while ticket < end:
        for _ in tl.range(0, _TURN):
            source = (me + ticket // each) % WORLD_SIZE
            tile_m, tile_n = tile_place(ticket % each, tiles_m, tiles_n, GROUP_M)
            row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
            first = tl.load(routes + source * _ROUTE + _FIRST_ROW).to(tl.int32)
            rows = tl.load(routes + source * _ROUTE + _ROWS).to(tl.int32)
            mine = (ticket < end) & (row < rows)
            if ticket < end:
                ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
            if mine:
                if not OWN:
                    if source != known_source:
                        known_source = source
                        known_blocks = 0
                    if tile_m >= known_blocks:
                        lanes = tl.arange(0, _LOOK)
                        for start in range(known_blocks, tile_m + 1, _LOOK):
                            block = start + lanes
                            here = flags + _HEADER + source * per_source + block
                            complete = il.wait(here, stamp, source + lanes * 0, start, group, block <= tile_m)
                            arrived = arrived * complete.to(tl.int32)
                        known_blocks = tile_m + 1
                        if DESCRIPTORS:
                            il.accept_tiles()
                x_row = row if OWN else first + row
                total = multiply_tile(
                    x, w, x_row, column, rows if OWN else first + rows, N, K, x_stride, w_stride,
                    DESCRIPTORS, W_ALONG_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                if x_scale is not None:
                    total = scale_tile(
                        total, x_scale, w_scale, x_row, column, rows if OWN else first + rows, N, x_scale_stride, w_scale_stride
                    )  # fmt: skip
                if bias is not None:
                    total = add_bias(total, bias, column, N)
                m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
                value = tl.where((arrived + m * 0 > 0)[:, None], total, float("nan")).to(OUT)
                if TILES:
                    result.store([first + row, column], value)
                else:
                    cells = (first + m).to(tl.int64)[:, None] * row_stride + n[None, :]
                    tl.store(il.pointer(y_address, OUT) + cells, value, mask=(m < rows)[:, None] & (n < N)[None, :])
    return ticket


@triton.jit(
    do_not_specialize=[
        "gathered_address", "y_address", "buffer_bytes", "scale_offset", "taken", "signals", "call", "per_source", "most_rows", "N", "K", "x_stride",
        "w_stride", "x_scale_stride", "w_scale_stride", "row_groups", "inner_groups",
    ]
)
def all_gather_gemm(
    x, w, bias, x_scale, w_scale, scales, gathered, whole, result, gathered_address, y_address, signals, epochs, ctx, routes, call,
    buffer_bytes, scale_offset, taken, per_source, most_rows, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, row_groups,
    inner_groups,
    PUSHERS: tl.constexpr, GATHER: tl.constexpr, MEMBERS: tl.constexpr, WORLD_SIZE: tl.constexpr, OUT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TILES: tl.constexpr, W_ALONG_K: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    INNER_ALIGN: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Send this rank's rows of x to every peer, and multiply all ranks' rows, this rank's own first.

    Protocol: program 0 grants this rank's buffer for the gathered x to every source, with a signal. The first ``PUSHERS`` programs
    wait for all grants and put this rank's rows in every peer's buffer, a block of ``BLOCK_M`` rows after the other; the last
    of the programs that share a block sets its signal ``[me][block]`` there. Then they end, and give their processors to
    further programs. The others take tiles by tickets: this rank's own rows, straight from x; then the neighbour's and so on,
    each after its block has come. The last one to find no ticket sets the tickets back.

    No program waits for one of a higher index: pushers for program 0's grants, the others for pushers.

    Example: two ranks with one row each, a on rank 0 and b on rank 1. Rank 0 puts a in row 0 of rank 1's gathered x, computes
    a @ w0.T, and, once b is in row 1 of its gathered x, b @ w0.T.
    """
    program = tl.program_id(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    flags = il.pointer(signals, tl.int32)
    row_stride, K_padded = row_groups * ALIGN, inner_groups * INNER_ALIGN
    if program < PUSHERS:
        if PUSHERS > 0:
            if program == 0:
                il.put(flags + _GRANTS + me + tl.zeros_like(peers), taken + tl.zeros_like(peers), peers, group, others)
                il.signal(flags + me + tl.zeros_like(peers), stamp, peers, group, others)
            if il.wait(flags + peers, stamp, peers, 0, group, others):
                buffers = tl.where(peers == me, taken, il.get(flags + _GRANTS + peers, me, group, others, 0))
                first = tl.load(routes + me * _ROUTE + _FIRST_ROW).to(tl.int32)
                rows = tl.load(routes + me * _ROUTE + _ROWS).to(tl.int32)
                _push(
                    x, x_scale, gathered, gathered_address, buffers, buffer_bytes, scale_offset, flags + _HEADER + me * per_source,
                    flags + _HEADER + WORLD_SIZE * per_source, stamp, group, first, rows, K, x_stride, x_scale_stride, K_padded,
                    PUSHERS, WORLD_SIZE, GATHER, MEMBERS, DESCRIPTORS, TILES, BLOCK_M, BLOCK_K,
                )  # fmt: skip
    else:
        tickets = il.peer_pointer(flags + _TICKETS, me, group)
        each = ((most_rows + BLOCK_M - 1) // BLOCK_M) * ((N + BLOCK_N - 1) // BLOCK_N)
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        # This rank's own rows are read where they are, and the others' where they arrive: two loops, one after the other, since two
        # in the branches of one would need the shared memory of both.
        ticket = _multiply(
            ticket, each, tickets, x, w, bias, x_scale, w_scale, result, y_address, routes, flags, per_source, stamp, group, most_rows,
            N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, row_stride, each,
            True, WORLD_SIZE, OUT, DESCRIPTORS, TILES, W_ALONG_K, PRECISION, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if WORLD_SIZE > 1:
            ticket = _multiply(
                ticket, each * WORLD_SIZE, tickets, whole, w, bias, scales, w_scale, result, y_address, routes, flags, per_source, stamp,
                group, most_rows, N, K, K_padded, w_stride, 1, w_scale_stride, row_stride, each,
                False, WORLD_SIZE, OUT, DESCRIPTORS, TILES, W_ALONG_K, PRECISION, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        members = tl.num_programs(0) - PUSHERS
        if il.arrive_last(il.peer_pointer(flags + _COUNTER, me, group), program - PUSHERS, members):
            tl.store(tickets, 0)
    il.advance_epoch(epochs, epoch)


# Rows that copy engines fetch: three small launches around the copies


@triton.jit(do_not_specialize=["staged_address", "scale_offset", "signals", "per_source", "rows", "K", "x_stride", "x_scale_stride", "inner_groups"])
def stage_rows(
    x, x_scale, staged_address, scale_offset, signals, epochs, ctx, notes, call, per_source, rows, K, x_stride, x_scale_stride, inner_groups,
    WORLD_SIZE: tl.constexpr, INNER_ALIGN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Copy this rank's rows to where peers may fetch them, and tell them.

    Protocol: wait until every peer has fetched the rows of the call before (its signal ``[DONE + peer]``), copy, and set this
    rank's signal at every peer. Writes this call's epoch to ``notes``, for the launches that run beside the product.

    Example: two ranks; rank 1's third call finds 2 in the signal that rank 0 sets, copies its rows, and sets 3 on rank 0.
    """
    program = tl.program_id(0)
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    flags = il.pointer(signals, tl.int32)
    K_padded = inner_groups * INNER_ALIGN
    if program == 0:
        tl.store(notes, epoch)
    if il.wait(flags + _DONE + peers, il.previous_epoch(epoch), peers, 0, group, others):
        target = il.peer_pointer(il.pointer(staged_address, x.dtype.element_ty), me, group)
        lines, columns = tl.arange(0, ROWS), tl.arange(0, COLS)
        for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
            m = (first + lines).to(tl.int64)[:, None]
            for start in range(0, K, COLS):
                k = start + columns[None, :]
                inside = (m < rows) & (k < K)
                value = tl.load(x + m * x_stride + k, mask=inside, other=0.0)
                tl.store(target + m * K_padded + k, value, mask=inside)
            if x_scale is not None:
                scale = tl.load(x_scale + (first + lines) * x_scale_stride, mask=first + lines < rows, other=0.0)
                scales = il.peer_pointer(il.pointer(staged_address + scale_offset, tl.float32), me, group)
                tl.store(scales + first + lines, scale, mask=first + lines < rows)
        counter = il.peer_pointer(flags + _HEADER + WORLD_SIZE * per_source, me, group)
        if il.arrive_last(counter, program, tl.num_programs(0)):
            il.signal(flags + me + tl.zeros_like(peers), il.mark(epoch, call), peers, group, others)


@triton.jit(do_not_specialize=["signals", "count"])
def admit_copies(signals, ctx, notes, call, count, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Wait until every peer has staged its rows; the copies follow on the same stream.

    Writes ``count`` stamps to ``notes[1 :]``, which are copied to the product's signals after the rows: this call's, or what no
    call waits for if a peer's rows have not come.
    """
    epoch = tl.load(notes)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != il.rank(group))
    arrived = il.wait(il.pointer(signals, tl.int32) + peers, stamp, peers, 0, group, others)
    for start in range(0, count, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        tl.store(notes + 1 + lanes, tl.where(arrived & (lanes >= 0), stamp, 0), mask=lanes < count)


@triton.jit(do_not_specialize=["signals"])
def release_rows(signals, ctx, notes, WORLD_SIZE: tl.constexpr):
    """Tell every peer that its rows have been fetched."""
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    il.signal(il.pointer(signals, tl.int32) + _DONE + me + tl.zeros_like(peers), tl.load(notes), peers, group, others)
