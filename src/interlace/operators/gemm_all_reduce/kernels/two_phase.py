"""The kernel of the two-phase protocol: owners of rows reduce them and broadcast the results."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.gemv import (
    Result, matrices_of, multiply_tile, point_to_operands, store_output, tile_at,
)
from interlace.gemm.kernels.words import (
    agree, announce, end_call, in_words, out_of_words, words_of,
)
from interlace.language.sizes import next_power_of_2


class WordSlots(NamedTuple):
    """The symmetric memory that partial sums travel through in one call.

    Attributes:
        first: Pointer to the slot of rank 0; the slot of rank r lies ``r * size`` words behind it.
        size: Words in a slot.
        results: Pointer to the words of the results, behind the slots.
        stamp: The call's stamp, which every word carries.
    """

    first: Any
    size: Any
    results: Any
    stamp: Any


@triton.jit(do_not_specialize=["words", "call", "half", "slot", "tiles"])
def gemv_all_reduce_two_phase(
    x, w, bias, y, words, epochs, ctx, call, half, slot, N, B, K, tiles, stride_x, stride_w,
    WORLD_SIZE: tl.constexpr, ONE_TILE: tl.constexpr, TILING: tl.constexpr,
):
    """Compute ``y = sum over ranks of x @ w.T, + bias``; each rank sums some rows of every tile.

    A rank owns ``block_n / WORLD_SIZE`` rows of a tile, rounded up: it reduces them and broadcasts
    the result.

    **Protocol.** A program puts each row of its partial tiles as packed words at the row's owner
    (one store, whose peer is a tile), in slot ``[epoch % 2][rank]``. It waits for the words of the
    rows that it owns, adds them in rank order, adds the bias, rounds, and puts the results as
    packed words at every peer, behind the slots. Then it waits for its tiles' results. Partial sums
    of a half may be written again two calls later: the writer has then had the results of the call
    in between, which their owner sent after it had read; and results are sent only to ranks that
    have sent their parts. Words of two values are as in :func:`gemv_all_reduce_one_shot`.

    **Example.** Two ranks, ``block_n`` = 2: rank 0 owns row 0 and rank 1 row 1 of every tile. With
    parts ``[1, 2]`` and ``[10, 20]``, rank 1 sends 10 to rank 0, which adds 1 and sends 11 back;
    rank 0 sends 2 and gets 22.
    """
    BLOCK_N: tl.constexpr = TILING.block_n
    VALUES: tl.constexpr = TILING.word_values
    OWNED: tl.constexpr = (BLOCK_N + WORLD_SIZE - 1) // WORLD_SIZE
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
    stamp = il.mark(epoch, call)
    slot = tl.multiple_of(slot.to(tl.int64), 16)
    # The two halves take turns, so that a peer may still read the words of the last call.
    calls = il.pointer(words, tl.int64) + tl.multiple_of((epoch & 1).to(tl.int64) * half, 16)
    first = calls + 16
    slots = WordSlots(first, slot, first + WORLD_SIZE * slot, stamp)
    agreed = 1
    if (VALUES == 2) & (program == 0):
        announce(calls, stamp, group, WORLD_SIZE)
    # Phase 1 sends parts to the owners of their rows. All tiles are sent before the first is waited
    # for, so that no two ranks wait for each other.
    if ONE_TILE:
        _send_part(program, part, slots, group, N, B, OWNED, TILING)
    else:
        for tile in range(program, tiles, programs):
            il.record("tile", tile, group)
            operands = point_to_operands(tile, matrices, TILING)
            part = multiply_tile(operands, K, TILING)
            _send_part(tile, part, slots, group, N, B, OWNED, TILING)
    if (VALUES == 2) & (program == programs - 1):
        agreed = agree(calls, stamp, group, WORLD_SIZE)
    # Phase 2 sends the sums of the rows that this rank owns to everyone.
    for tile in range(program, tiles, programs):
        _send_sum(tile, result, slots, group, WORLD_SIZE, OWNED, TILING)
    # The results of every owner arrive as words that carry this call's stamp.
    owner = (tl.arange(0, BLOCK_N) // OWNED)[:, None]
    for tile in range(program, tiles, programs):
        rows, tokens, mask = tile_at(tile, N, B, TILING)
        offsets, inside = words_of(tile, rows, N, B, TILING)
        value = il.get_packed(slots.results + offsets, stamp, owner, tile, group, inside, VALUES)
        store_output(result, out_of_words(value, VALUES), rows, tokens, mask, False)
    end_call(result, words, half, epochs, epoch, agreed, group)


@triton.jit
def _send_part(tile, part, slots, group, N, B, OWNED: tl.constexpr, TILING: tl.constexpr):
    """Put each row of a partial tile at the row's owner."""
    VALUES: tl.constexpr = TILING.word_values
    rows, tokens, mask = tile_at(tile, N, B, TILING)
    offsets, inside = words_of(tile, rows, N, B, TILING)
    line = tl.arange(0, TILING.block_n)
    slot = slots.first + il.rank(group) * slots.size
    target = slot + _owned_words(tile, line % OWNED, OWNED, TILING)
    words = in_words(part, VALUES)
    # One store sends every row to its owner: the peer is a tile, as the pointers are.
    owner = (line // OWNED)[:, None]
    il.put_packed(target, words, slots.stamp, owner, group, inside, VALUES)


@triton.jit
def _send_sum(
    tile, result, slots, group, WORLD_SIZE: tl.constexpr, OWNED: tl.constexpr, TILING: tl.constexpr
):
    """Add up the rows of a tile that this rank owns, and put the results at every peer."""
    BLOCK_OWNED: tl.constexpr = next_power_of_2(OWNED)
    VALUES: tl.constexpr = TILING.word_values
    TREE: tl.constexpr = tl.dtype(TILING.node) if TILING.in_tree else None
    rank = il.rank(group)
    line = tl.arange(0, BLOCK_OWNED)
    rows, tokens, mask = tile_at(tile, result.N, result.B, TILING)
    rows = tl.min(rows) + rank * OWNED + line
    offsets, inside = words_of(tile, rows, result.N, result.B, TILING)
    # The last owner may have fewer rows than the others, and lanes are a power of two.
    inside = inside & ((line < OWNED) & (rank * OWNED + line < TILING.block_n))[:, None]
    parts = slots.first + _owned_words(tile, line, OWNED, TILING)
    # Every rank's part is waited for; they are added in rank order, so that all get the same bits.
    words = il.sum_packed(
        parts, None, slots.size, slots.stamp, tile, group, inside, WORLD_SIZE, VALUES, TREE
    )
    total = out_of_words(words, VALUES)
    if result.bias is not None:
        total += tl.load(result.bias + tl.minimum(rows, result.N - 1)).to(tl.float32)[:, None]
    value = in_words(total.to(result.y.dtype.element_ty).to(tl.float32), VALUES)
    # The last step is this rank itself, which reads the sums of its own rows like any owner's.
    for step in tl.static_range(1, WORLD_SIZE + 1):
        target = slots.results + offsets
        peer = (rank + step) % WORLD_SIZE
        il.put_packed(target, value, slots.stamp, peer, group, inside, VALUES)


@triton.jit
def _owned_words(tile, line, OWNED: tl.constexpr, TILING: tl.constexpr):
    """Return the offsets of the words of an owner's ``line`` of ``tile`` in a slot."""
    WORDS: tl.constexpr = TILING.block_b // TILING.word_values
    return (tile * OWNED + line[:, None]).to(tl.int64) * WORDS + tl.arange(0, WORDS)[None, :]
