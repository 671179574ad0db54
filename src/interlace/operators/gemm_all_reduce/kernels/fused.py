"""The kernel of ``impl="fused"``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.grants import (
    await_senders, end_sending, grant_buffer, granted_buffers, own_output, turn_of,
)
from interlace.gemm.kernels.places import HEADER
from interlace.gemm.kernels.reduction import Results, Slots, send_and_sum
from interlace.gemm.kernels.tiles import Matrices, padded_stride, start_in_turn


@triton.jit(
    do_not_specialize=[
        "own_buffer", "signals", "call", "per_source", "most_rows", "M", "N", "K", "x_stride",
        "w_stride", "spread_ns",
    ]
)
def gemm_all_reduce(
    x, w, bias, scales, slots, results, waiting, halves, buffers, own_buffer, signals, epochs, ctx,
    routes, call, per_source, most_rows, M, N, K, x_stride, w_stride, spread_ns,
    SENDING: tl.constexpr, TILING: tl.constexpr,
):
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

    Args:
        scales: A :class:`Scales`.
        slots, results: Tensor descriptors; see :class:`Slots` and :class:`Results`.
        waiting: A tensor descriptor where sums of several leaves wait, or None; see
            :func:`add_to_tree`.
        halves: A :class:`SlotHalves`.
        buffers: An :class:`OutputBuffers`.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    flags = il.pointer(signals, tl.int32)
    turn = turn_of(flags, epoch, me, WORLD_SIZE)
    # 1. Every source learns which of this rank's buffers it may write.
    if program == 0:
        grant_buffer(turn, own_buffer, stamp, group)
    if spread_ns > 0:
        start_in_turn(spread_ns)
    granted, numbers = granted_buffers(turn, own_buffer, stamp, group)
    arrived = granted.to(tl.int32)
    matrices = Matrices(x, w, N, K, x_stride, w_stride)
    # Slots have two halves: a peer may still read the parts of the last call.
    half = epoch & 1
    row_stride = padded_stride(N, SENDING.align)
    slot_half = halves.address + half * halves.nbytes
    arriving = Slots(slots, slot_half, half, most_rows, row_stride, flags + HEADER, per_source)
    sums = Results(results, buffers.address, numbers, buffers.nbytes)
    # Without every grant nothing is sent: a buffer that was not granted may hold a tensor in use.
    if arrived > 0:
        # 2. Parts go to their owners; each owner's sums go to every rank's buffer.
        arrived = send_and_sum(
            matrices, scales, bias, arriving, sums, waiting, routes, stamp, group, True, SENDING,
            TILING,
        )
        if SENDING.tile_stores:
            il.complete_tiles()
        # 3. The last program to have sent everything tells the peers that their buffers are whole.
        end_sending(turn, flags, stamp, group)
    # 4. Nobody reads or writes anything of this call once all peers have said so.
    if program == programs - 1:
        # The program of the highest index is the one that waits, so that its wait keeps no other
        # program of this launch from a processor.
        complete = await_senders(turn, stamp, group).to(tl.int32)
        if arrived * complete == 0:
            output = own_output(buffers, own_buffer, me, group, tl.dtype(SENDING.dtype))
            il.fill_nan(output, M.to(tl.int64) * row_stride)
    il.clear_old(flags + HEADER, WORLD_SIZE * per_source, epoch, group)
    il.advance_epoch(epochs, epoch)
