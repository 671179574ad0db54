"""The kernel of the one-shot protocol: every rank sends its part of every output to all."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.gemv import (
    Result, matrices_of, multiply_tile, point_to_operands, store_output, tile_at,
)
from interlace.gemm.kernels.words import (
    agree, announce, end_call, in_words, out_of_words, words_of,
)


@triton.jit(do_not_specialize=["words", "call", "half", "slot", "tiles"])
def gemv_all_reduce_one_shot(
    x, w, bias, y, words, epochs, ctx, call, half, slot, N, B, K, tiles, stride_x, stride_w,
    WORLD_SIZE: tl.constexpr, ONE_TILE: tl.constexpr, TILING: tl.constexpr,
):
    """Compute ``y = sum over ranks of x @ w.T, + bias``; every rank sends its part of every output.

    **Protocol.** A program computes its tiles' partial sums and puts them as packed words into slot
    ``[epoch % 2][rank]`` of every peer. Then it waits, word by word, for the same tiles of the
    other ranks and adds them in rank order. No signal is needed, as a word carries its stamp. A
    half may be written again two calls later: by then its reader has sent the words of the call in
    between, which it did after reading. Words of two values carry no mark. So the last program
    waits for the word of every peer's program 0 that does, while its own sums are on their way, and
    makes y NaN if one is of another call.

    **Example.** Two ranks, N = 2, partial sums ``[1, 2]`` on rank 0 and ``[10, 20]`` on rank 1.
    Rank 0's slot 1 receives ``(10, e) (20, e)``, rank 1's slot 0 ``(1, e) (2, e)``; both compute
    ``[11, 22]``.
    """
    VALUES: tl.constexpr = TILING.word_values
    TREE: tl.constexpr = tl.dtype(TILING.node) if TILING.in_tree else None
    program, programs = tl.program_id(0), tl.num_programs(0)
    matrices = matrices_of(x, w, N, B, K, stride_x, stride_w, TILING)
    N, K = matrices.N, matrices.K
    result = Result(y, bias, N, B)
    if ONE_TILE:
        operands = point_to_operands(program, matrices, TILING)
    # Epoch and group are asked for once the first weights are under way, because the compiler
    # waits at once for values that all threads share.
    epoch, group = il.next_epoch(epochs), il.join(ctx)
    if ONE_TILE:
        il.record("tile", program, group)
        part = multiply_tile(operands, K, TILING)
    rank = il.rank(group)
    stamp = il.mark(epoch, call)
    slot = tl.multiple_of(slot.to(tl.int64), 16)
    # The two halves take turns, so that a peer may still read the words of the last call.
    calls = il.pointer(words, tl.int64) + tl.multiple_of((epoch & 1).to(tl.int64) * half, 16)
    slots = calls + 16
    agreed = 1
    # Program 0 announces the call first of all, so that no peer waits for it long.
    if (VALUES == 2) & (program == 0):
        announce(calls, stamp, group, WORLD_SIZE)
    if ONE_TILE:
        # The part of this rank stays in registers; only the peers' parts travel.
        part = in_words(part, VALUES)
        rows, tokens, mask = tile_at(program, N, B, TILING)
        offsets, inside = words_of(program, rows, N, B, TILING)
        for step in tl.static_range(1, WORLD_SIZE):
            # The next rank is the first to be sent to, so that ranks do not crowd one link.
            target = slots + rank * slot + offsets
            peer = (rank + step) % WORLD_SIZE
            il.put_packed(target, part, stamp, peer, group, inside, VALUES)
        if (VALUES == 2) & (program == programs - 1):
            agreed = agree(calls, stamp, group, WORLD_SIZE)
        # A word is complete once it carries this call's stamp: waiting is reading it again.
        total = il.sum_packed(
            slots + offsets, part, slot, stamp, program, group, inside, WORLD_SIZE, VALUES, TREE
        )
        store_output(result, out_of_words(total, VALUES), rows, tokens, mask, True)
    else:
        # All tiles are sent before the first is waited for, so that no two ranks wait for each
        # other.
        for tile in range(program, tiles, programs):
            il.record("tile", tile, group)
            operands = point_to_operands(tile, matrices, TILING)
            part = in_words(multiply_tile(operands, K, TILING), VALUES)
            rows, tokens, mask = tile_at(tile, N, B, TILING)
            offsets, inside = words_of(tile, rows, N, B, TILING)
            # The last step is this rank itself: with several tiles, its parts do not stay in
            # registers until they are added.
            for step in tl.static_range(1, WORLD_SIZE + 1):
                target = slots + rank * slot + offsets
                peer = (rank + step) % WORLD_SIZE
                il.put_packed(target, part, stamp, peer, group, inside, VALUES)
        if (VALUES == 2) & (program == programs - 1):
            agreed = agree(calls, stamp, group, WORLD_SIZE)
        for tile in range(program, tiles, programs):
            rows, tokens, mask = tile_at(tile, N, B, TILING)
            offsets, inside = words_of(tile, rows, N, B, TILING)
            total = il.sum_packed(
                slots + offsets, None, slot, stamp, tile, group, inside, WORLD_SIZE, VALUES, TREE
            )
            store_output(result, out_of_words(total, VALUES), rows, tokens, mask, True)
    end_call(result, words, half, epochs, epoch, agreed, group)
