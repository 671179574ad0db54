"""The kernel of ``gemm_reduce_scatter``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.products import record
from interlace.products.kernel import start_in_turn
from interlace.products.reduction import send_and_sum

_DONE = tl.constexpr(record.DONE)
_COUNTER = tl.constexpr(record.COUNTER)
_HEADER = tl.constexpr(record.HEADER)


@triton.jit(
    do_not_specialize=[
        "slot_address", "half_bytes", "y_address", "signals", "call", "per_source", "most_rows", "N", "K", "x_stride", "w_stride",
        "x_scale_stride", "w_scale_stride", "row_groups", "spread_ns",
    ]
)
def gemm_reduce_scatter(
    x, w, bias, x_scale, w_scale, slots, results, slot_address, half_bytes, y_address, signals, epochs, ctx, routes, call, per_source,
    most_rows, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, row_groups, spread_ns,
    WORLD_SIZE: tl.constexpr, OUT: tl.constexpr, DESCRIPTORS: tl.constexpr, TILES: tl.constexpr, W_ALONG_K: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr, GROUP_M: tl.constexpr, INTERLEAVE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply, send every rank its rows' parts, tile by tile, and add up this rank's own.

    Protocol: a tile of rank d's rows goes into the slot ``[half][me]`` on d, then its signal ``[me][tile]`` is set there. d adds the
    slots' tiles to its own when these signals are all there; see :func:`send_and_sum`. The last program to have sent
    everything sets DONE at every peer, and the program of the highest index waits for all peers' DONE: so a rank is never two
    calls ahead of another one, and the epoch's parity chooses a half that nobody reads any more.

    Example: two ranks, two rows; the products are [a0, a1] on rank 0 and [b0, b1] on rank 1. Rank 0 puts a1 into rank 1's slot and
    adds b0 from its own slot to a0; rank 1 puts b0 and adds a1 to b1. Outputs: [a0 + b0] and [a1 + b1].
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    flags = il.pointer(signals, tl.int32)
    if spread_ns > 0:
        start_in_turn(spread_ns)
    send_and_sum(
        x, w, bias, x_scale, w_scale, slots, slot_address, results, y_address, peers * 0, 0, routes, flags + _HEADER, per_source, stamp,
        group, epoch & 1, half_bytes, most_rows, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, row_groups * ALIGN,
        WORLD_SIZE, OUT, False, DESCRIPTORS, TILES, W_ALONG_K, PRECISION, GROUP_M, INTERLEAVE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if WORLD_SIZE > 1:
        if il.arrive_last(il.peer_pointer(flags + _COUNTER, me, group), program, programs):
            il.signal(flags + _DONE + me + tl.zeros_like(peers), stamp, peers, group, others)
        if program == programs - 1:
            il.wait(flags + _DONE + peers, stamp, peers, 0, group, others)
    il.advance_epoch(epochs, epoch)


# Small launches between the products of a ring


@triton.jit(do_not_specialize=["signals", "call"])
def begin_ring(signals, epochs, ctx, notes, call, WORLD_SIZE: tl.constexpr):
    """Wait until the next rank may be sent to again.

    Protocol: its signal ``[DONE]`` here is the last call's epoch once it has read all that this rank sent it then. ``notes``, for
    what follows: this call's epoch; its stamp, which partial sums carry, or what no call waits for if something has not come.

    Example: on rank 0 of two the third call finds 2 in the signal that rank 1 sets, and notes 3 and its stamp.
    """
    epoch = il.next_epoch(epochs)
    group = il.join(ctx)
    lanes = tl.arange(0, 1)
    following = (il.rank(group) + 1) % WORLD_SIZE + lanes
    free = il.wait(il.pointer(signals, tl.int32) + _DONE + following, il.previous_epoch(epoch), following, 0, group, lanes == 0)
    tl.store(notes, epoch)
    tl.store(notes + 1, il.mark(epoch, call) * free.to(tl.int32))
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["signals", "call", "index"])
def await_partial(signals, ctx, notes, call, index, WORLD_SIZE: tl.constexpr):
    """Wait for one partial sum from the rank before. If it does not come, nothing that this rank sends counts any more.

    Protocol: ``signals[index]`` is this call's stamp once the copy before it has ended.

    Example: rank 2 waits for rank 1, which died; it notes 0, sends that as its own signals, and rank 3 takes nothing for a result.
    """
    group = il.join(ctx)
    lanes = tl.arange(0, 1)
    before = (il.rank(group) + WORLD_SIZE - 1) % WORLD_SIZE + lanes
    stamp = il.mark(tl.load(notes), call)
    if not il.wait(il.pointer(signals, tl.int32) + index + lanes, stamp, before, 0, group, lanes == 0):
        tl.store(notes + 1, 0)


@triton.jit(do_not_specialize=["cells", "last_cells", "signals", "call"])
def finish_ring(y, last, summed, cells, last_cells, signals, ctx, notes, call, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy ``last``, the end of y, from where it was summed, and tell the rank before that it may send again.

    Where something had not come, all of y becomes NaN.

    Example: y has 10 elements; copy engines took the first 5 from their slot, and the other 5 are copied here.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    group = il.join(ctx)
    me = il.rank(group)
    flags = il.pointer(signals, tl.int32)
    epoch = tl.load(notes)
    if tl.load(notes + 1) == il.mark(epoch, call):
        for block in range(program, (last_cells + BLOCK - 1) // BLOCK, programs):
            place = (block + tl.zeros([BLOCK], tl.int64)) * BLOCK + tl.arange(0, BLOCK)
            tl.store(last + place, tl.load(summed + place, mask=place < last_cells), mask=place < last_cells)
    else:
        for block in range(program, (cells + BLOCK - 1) // BLOCK, programs):
            place = (block + tl.zeros([BLOCK], tl.int64)) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y + place, tl.full([BLOCK], float("nan"), tl.float32).to(y.dtype.element_ty), mask=place < cells)
    if il.arrive_last(il.peer_pointer(flags + _COUNTER, me, group), program, programs):
        lanes = tl.arange(0, 1)
        before = (me + WORLD_SIZE - 1) % WORLD_SIZE + lanes
        il.signal(flags + _DONE + me + lanes, epoch, before, group, lanes == 0)
