"""The kernel of ``gemm_all_reduce``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels import layout
from interlace.gemm.kernels.tiles import start_in_turn
from interlace.gemm.kernels.reduction import send_and_sum

_MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
_DONE = tl.constexpr(layout.DONE)
_COUNTER = tl.constexpr(layout.COUNTER)
_GRANTS = tl.constexpr(layout.GRANTS)
_HEADER = tl.constexpr(layout.HEADER)


@triton.jit(
    do_not_specialize=[
        "slot_address", "half_bytes", "outputs", "buffer_bytes", "taken", "signals", "call",
        "per_source", "most_rows", "M", "N", "K", "x_stride", "w_stride", "x_scale_stride",
        "w_scale_stride", "row_groups", "spread_ns",
    ]
)
def gemm_all_reduce(
    x, w, bias, x_scale, w_scale, slots, results, slot_address, half_bytes, outputs, signals,
    epochs, ctx, routes, call, buffer_bytes, taken, per_source, most_rows, M, N, K, x_stride,
    w_stride, x_scale_stride, w_scale_stride, row_groups, spread_ns, WORLD_SIZE: tl.constexpr,
    OUT: tl.constexpr, DESCRIPTORS: tl.constexpr, TILES: tl.constexpr, W_ALONG_K: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr, GROUP_M: tl.constexpr, INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply, send every rank its rows' parts, add up this rank's own, and send the sums to all.

    Protocol: program 0 grants this rank's output buffer to every source, with a signal. Parts go
    into slots and are added as in ``gemm_reduce_scatter`` (see :func:`send_and_sum`); each summed
    tile goes into every rank's output, straight to its place. The last program to have sent
    everything sets DONE at every peer, and the program of the highest index waits for all of them:
    then the output is whole, and no peer reads or writes anything of this call any more. Grants and
    DONE have two sets; a tile's signal has one, which is set again after DONE of its reader.

    Example: two ranks, two rows; the products are [a0, a1] on rank 0 and [b0, b1] on rank 1. Rank 0
    puts a1 into rank 1's slot, adds b0 from its own slot to a0, and puts a0 + b0 into row 0 of both
    outputs; rank 1 does the same with row 1.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    flags = il.pointer(signals, tl.int32)
    granted, done = il.in_turn(flags, epoch, _MAX_RANKS), il.in_turn(flags + _DONE, epoch, _MAX_RANKS)
    numbers = il.in_turn(flags + _GRANTS, epoch, _MAX_RANKS)
    if program == 0:
        il.put(numbers + me + tl.zeros_like(peers), taken + tl.zeros_like(peers), peers, group, others)
        il.signal(granted + me + tl.zeros_like(peers), stamp, peers, group, others)
    if spread_ns > 0:
        start_in_turn(spread_ns)
    arrived = il.wait(granted + peers, stamp, peers, 0, group, others).to(tl.int32)
    buffers = tl.where(peers == me, taken, il.get(numbers + peers, me, group, others, 0))
    if arrived > 0:
        arrived = send_and_sum(
            x, w, bias, x_scale, w_scale, slots, slot_address, results, outputs, buffers,
            buffer_bytes, routes, flags + _HEADER, per_source, stamp, group, epoch & 1, half_bytes,
            most_rows, N, K, x_stride, w_stride, x_scale_stride, w_scale_stride, row_groups * ALIGN,
            WORLD_SIZE, OUT, True, DESCRIPTORS, TILES, W_ALONG_K, PRECISION, GROUP_M, INTERLEAVE,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if TILES:
            il.complete_tiles()
        if il.arrive_last(il.peer_pointer(flags + _COUNTER, me, group), program, programs):
            il.signal(done + me + tl.zeros_like(peers), stamp, peers, group, others)
    if program == programs - 1:
        complete = il.wait(done + peers, stamp, peers, 0, group, others).to(tl.int32)
        if arrived * complete == 0:
            mine = outputs + taken.to(tl.int64) * buffer_bytes + me * tl.multiple_of(group[2], 16)
            il.fill_nan(il.pointer(mine, OUT), M.to(tl.int64) * row_groups * ALIGN)
    il.clear_old(flags + _HEADER, WORLD_SIZE * per_source, epoch, group)
    il.advance_epoch(epochs, epoch)
