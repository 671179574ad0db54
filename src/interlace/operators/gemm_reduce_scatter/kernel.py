"""The kernel of ``gemm_reduce_scatter``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.grants import await_senders, end_sending, turn_of
from interlace.gemm.kernels.places import HEADER
from interlace.gemm.kernels.reduction import Results, Slots, add_parts, send_and_sum
from interlace.gemm.kernels.tiles import (
    Matrices, add_bias, cells_of, multiply_tile, padded_stride, start_in_turn, tile_place,
)
from interlace.language.sizes import next_power_of_2
from interlace.mapped.kernel import tile_at, tiles_of


@triton.jit(
    do_not_specialize=[
        "y_address", "signals", "call", "per_source", "most_rows", "N", "K", "x_stride", "w_stride",
        "spread_ns",
    ]
)
def gemm_reduce_scatter(
    x, w, bias, scales, slots, results, waiting, halves, y_address, signals, epochs, ctx, routes,
    call, per_source, most_rows, N, K, x_stride, w_stride, spread_ns, SENDING: tl.constexpr,
    TILING: tl.constexpr,
):
    """Multiply, send every rank its rows' parts, tile by tile, and add up this rank's own.

    Protocol: a tile of rank d's rows goes into the slot ``[half][me]`` on d, then its signal
    ``[me][tile]`` is set there. d adds the slots' tiles to its own when these signals are all
    there; see :func:`send_and_sum`. The last program to have sent everything sets DONE at every
    peer, and the program of the highest index waits for all peers' DONE: so a rank is never two
    calls ahead of another one, and the epoch's parity chooses a half that nobody reads any more. It
    may be one call ahead (a rank without rows waits for nothing else), so DONE has two sets. A
    tile's signal has one: it is set again only after DONE of its reader, which has seen it then.

    Example: two ranks, two rows; the products are [a0, a1] on rank 0 and [b0, b1] on rank 1. Rank 0
    puts a1 into rank 1's slot and adds b0 from its own slot to a0; rank 1 puts b0 and adds a1 to
    b1. Outputs: [a0 + b0] and [a1 + b1].

    Args:
        scales: A :class:`Scales`.
        slots, results: Tensor descriptors; see :class:`Slots` and :class:`Results`.
        waiting: A tensor descriptor where sums of several leaves wait, or None; see
            :func:`add_to_tree`.
        halves: A :class:`SlotHalves`.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    flags = il.pointer(signals, tl.int32)
    # Slots need no grants: their halves take turns with the epoch.
    turn = turn_of(flags, epoch, me, WORLD_SIZE)
    matrices = Matrices(x, w, N, K, x_stride, w_stride)
    # Slots have two halves: a peer may still read the parts of the last call.
    half = epoch & 1
    row_stride = padded_stride(N, SENDING.align)
    slot_half = halves.address + half * halves.nbytes
    arriving = Slots(slots, slot_half, half, most_rows, row_stride, flags + HEADER, per_source)
    sums = Results(results, y_address, turn.peers * 0, 0)
    if spread_ns > 0:
        start_in_turn(spread_ns)
    # 1. Parts go to their owners, and this rank's rows are summed as their parts come.
    send_and_sum(
        matrices, scales, bias, arriving, sums, waiting, routes, stamp, group, False, SENDING,
        TILING,
    )
    if WORLD_SIZE > 1:
        # 2. The last program to have sent everything tells the peers that this call is over here.
        end_sending(turn, flags, stamp, group)
        # 3. No rank may be two calls ahead: it would write a half that a peer still reads.
        if program == programs - 1:
            await_senders(turn, stamp, group)
        il.clear_old(flags + HEADER, WORLD_SIZE * per_source, epoch, group)
    il.advance_epoch(epochs, epoch)


# Around the products of a call in chunks


@triton.jit(do_not_specialize=["signals", "call"])
def admit_parts(signals, epochs, ctx, notes, call, WORLD_SIZE: tl.constexpr):
    """Wait until parts may be sent: every peer has read those of the last call. One program.

    Protocol: a peer's signal ``[DONE]`` here, of the set of the last call, is then the last call's
    epoch. ``notes`` receives, for later kernels and copies, this call's epoch, and its stamp, which
    copies set as the parts' signals; or 0, which no rank waits for, if a peer is missing.

    Example: the third call finds 2 in the signals that the peers set here, and notes 3 and its
    stamp.
    """
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    last = il.previous_epoch(epoch)
    turn = turn_of(il.pointer(signals, tl.int32), last, il.rank(group), WORLD_SIZE)
    free = await_senders(turn, last, group)
    tl.store(notes, epoch)
    tl.store(notes + 1, il.mark(epoch, call) * free.to(tl.int32))
    il.advance_epoch(epochs, epoch)


@triton.jit(
    do_not_specialize=[
        "slot_address", "y_address", "signals", "call", "most_rows", "rows", "piece_rows", "N", "K",
        "x_stride", "w_stride",
    ]
)
def multiply_and_sum(
    x, w, bias, slots, results, slot_address, y_address, signals, ctx, notes, call, most_rows, rows,
    piece_rows, N, K, x_stride, w_stride, PIECES: tl.constexpr, OWN_PART: tl.constexpr,
    SENDING: tl.constexpr, TILING: tl.constexpr,
):
    """Multiply this rank's own rows and add the peers' parts, tile by tile as these arrive.

    Protocol: copy engines put each peer's part into its slot, in pieces of ``piece_rows`` rows, and
    this call's stamp into the signal ``[source][piece]`` behind each. A tile is added up when all
    peers' pieces of its rows are here. The last program to have read everything sets DONE at every
    peer. In a sum of products (``OWN_PART``), this rank's slot holds its rows of the other
    products.

    Example: two ranks, four own rows, tiles of one row, two pieces: rows 0 and 1 need the other
    rank's first piece only.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    OUT: tl.constexpr = tl.dtype(SENDING.dtype)
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    GROUP_M: tl.constexpr = TILING.group_m
    program, programs = tl.program_id(0), tl.num_programs(0)
    group = il.join(ctx)
    me = il.rank(group)
    flags = il.pointer(signals, tl.int32)
    epoch = tl.load(notes)
    stamp = il.mark(epoch, call)
    row_stride = padded_stride(N, SENDING.align)
    matrices = Matrices(x, w, N, K, x_stride, w_stride)
    arriving = Slots(slots, slot_address, 0, most_rows, row_stride, flags + HEADER, PIECES)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
    pieces_here, all_arrived = 0, 1
    for tile in tl.range(program, tiles_m * tiles_n, programs):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        il.record("tile", tile, group)
        total = multiply_tile(matrices, row, column, rows, TILING)
        il.record("computed", tile, group)
        # Pieces arrive in order, so a tile waits only if it needs a later piece than those before.
        needed = (tl.minimum(row + BLOCK_M, rows) - 1) // piece_rows + 1
        if needed > pieces_here:
            all_arrived = all_arrived * _await_pieces(
                flags, stamp, needed, tile, group, PIECES, WORLD_SIZE
            )
            pieces_here = needed
            if SENDING.tile_stores:
                # Descriptors load through another proxy than the one that the wait orders.
                il.accept_tiles()
        total = add_parts(total, arriving, row, column, rows, N, group, SENDING, TILING, OWN_PART)
        total = il.nan_unless(all_arrived, total)
        if bias is not None:
            total = add_bias(total, bias, column, N)
        if SENDING.tile_stores:
            block = tl.reshape(total.to(OUT), [1, 1, 1, BLOCK_M, BLOCK_N])
            results.store([0, 0, 0, row, column], block)
        else:
            cells, inside = cells_of(0, row, column, rows, N, row_stride, TILING)
            tl.store(il.pointer(y_address, OUT) + cells, total.to(OUT), mask=inside)
    # The admission of the next call waits for DONE with the epoch alone, whatever that call's mark.
    end_sending(turn_of(flags, epoch, me, WORLD_SIZE), flags, epoch, group)
    il.clear_old(flags + HEADER, WORLD_SIZE * PIECES, epoch, group)


@triton.jit
def _await_pieces(
    flags, stamp, count, tile, group, PIECES: tl.constexpr, WORLD_SIZE: tl.constexpr
):
    """Wait for the first ``count`` pieces of every peer, and return whether they came (int32).

    Their signals are set by copies that follow the pieces on their streams. If one is late, a
    program's later tiles are NaN as well.
    """
    lanes = tl.arange(0, PIECES * next_power_of_2(WORLD_SIZE))
    sources, pieces = lanes // PIECES, lanes % PIECES
    awaited = (sources < WORLD_SIZE) & (sources != il.rank(group)) & (pieces < count)
    return il.wait(flags + HEADER + lanes, stamp, sources, tile, group, awaited).to(tl.int32)


@triton.jit(
    do_not_specialize=["slot_address", "signals", "call", "most_rows", "rows", "piece_rows"]
)
def add_pieces(
    y, bias, slot_address, signals, ctx, notes, call, most_rows, rows, piece_rows, N, row_stride,
    PIECES: tl.constexpr, WORLD_SIZE: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Add the peers' parts to this rank's own, which ``y [rows, N]`` holds, in float32 and in rank
    order, and the bias.

    Protocol: that of :func:`multiply_and_sum`, but that y holds the own product, rounded.

    Example: two ranks, y = [1, 2], and [10, 20] from the peer: y becomes [11, 22].
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    N, row_stride = il.multiple_of(N, FACTOR), il.multiple_of(row_stride, FACTOR)
    group = il.join(ctx)
    me = il.rank(group)
    flags = il.pointer(signals, tl.int32)
    epoch = tl.load(notes)
    stamp = il.mark(epoch, call)
    slots = il.pointer(slot_address, y.dtype.element_ty)
    slot_stride = most_rows.to(tl.int64) * row_stride
    pieces_here, all_arrived = 0, 1
    for tile in range(program, tiles_of(rows, N, ROWS, COLS), programs):
        m, n, inside = tile_at(tile, rows, N, ROWS, COLS)
        needed = tl.max(tl.minimum(m, rows - 1)).to(tl.int32) // piece_rows + 1
        if needed > pieces_here:
            all_arrived = all_arrived * _await_pieces(
                flags, stamp, needed, tile, group, PIECES, WORLD_SIZE
            )
            pieces_here = needed
        cells = m * row_stride + n
        own = tl.load(y + cells, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([ROWS, COLS], tl.float32)
        for source in tl.static_range(WORLD_SIZE):
            # Nobody has written this rank's own slot.
            part = il.get(
                slots + source * slot_stride + cells, me, group, inside & (source != me), 0.0
            )
            total += tl.where(source == me, own, part.to(tl.float32))
        if bias is not None:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        value = il.nan_unless(all_arrived, total)
        tl.store(y + cells, value.to(y.dtype.element_ty), mask=inside)
    end_sending(turn_of(flags, epoch, me, WORLD_SIZE), flags, epoch, group)
    il.clear_old(flags + HEADER, WORLD_SIZE * PIECES, epoch, group)
