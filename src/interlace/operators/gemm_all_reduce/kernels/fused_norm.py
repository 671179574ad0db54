"""One kernel from the product to the norm, for few tokens."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.gemv import matrices_of, multiply_tile, point_to_operands, tile_at
from interlace.gemm.kernels.words import agree, announce
from interlace.gemm.kernels.lamport import end_call, memory_of
from interlace.operators.gemm_all_reduce.kernels.norm import (
    Meeting, load_inputs, norm_and_store, place_of,
)


class LamportSlots(NamedTuple):
    """The symmetric memory that partial sums travel through.

    Attributes:
        words, half: See :func:`memory_of`.
        slot: Values of a slot; the slot of rank r lies ``r * slot`` values behind that of rank 0.
        line: Values from one token of a slot to the next.
    """

    words: Any
    half: Any
    slot: Any
    line: Any


@triton.jit(do_not_specialize=["words", "call", "half", "slot", "tiles", "producers"])
def multiply_sum_and_norm(
    x, w, inputs, outputs, words, epochs, ctx, call, half, slot, line, N, B, K, tiles, producers,
    stride_x, stride_w,
    WORLD_SIZE: tl.constexpr, ONE_TILE: tl.constexpr, COLUMNS: tl.constexpr,
    FORM: tl.constexpr, TILING: tl.constexpr,
):
    """Compute ``h = sum over ranks of x @ w.T, + bias, + residual``, and ``y = norm(h)``.

    The first ``producers`` programs multiply: each puts its tiles' partial sums, float32, into the
    slot of this rank on every rank, its own too, and ends. The programs behind them receive: each
    waits for ``COLUMNS`` columns of one token, adds the parts in rank order, adds bias and
    residual, and normalises. The programs that share a token tell each other their sums of squares
    by packed words of this rank.

    **Protocol.** Values show by themselves that they have arrived (:func:`il.sum_lamport`); the two
    halves of the slots take turns. A half is written again two calls later: by then its reader has
    sent the values of the call in between, which it did after it had read and freed the half.
    Values carry no mark, so every receiver waits for the word of every rank's program 0 that does.
    Producers wait for nobody. Receivers wait for producers and, where they share a token, for one
    another; so all receivers must be able to run at once, and there are no more than the GPU has
    processors.

    **Example.** Two ranks, one token, N = 2, partial sums ``[1, 2]`` and ``[10, 20]``, residual
    ``[0, 2]``: both ranks store the residual ``[11, 24]`` and, of the root mean square 18.7, y =
    ``[0.59, 1.29]``.
    """
    memory = LamportSlots(words, half, slot, line)
    if tl.program_id(0) < producers:
        matrices = matrices_of(x, w, N, B, K, stride_x, stride_w, TILING)
        epoch, group = _multiply_and_send(
            matrices, memory, epochs, ctx, call, tiles, producers, WORLD_SIZE, ONE_TILE, TILING
        )
    else:
        columns = il.multiple_of(N, TILING.factor)
        epoch, group = _receive(
            inputs, outputs, columns, B, memory, epochs, ctx, call, producers, WORLD_SIZE,
            COLUMNS, FORM,
        )
    end_call(words, half, epochs, epoch, group)


@triton.jit
def _multiply_and_send(
    matrices, memory, epochs, ctx, call, tiles, producers, WORLD_SIZE: tl.constexpr,
    ONE_TILE: tl.constexpr, TILING: tl.constexpr,
):
    """Compute this program's tiles of the product, and put them into every rank's slots.

    Returns:
        The call's epoch, and the value of ``il.join``.
    """
    program = tl.program_id(0)
    if ONE_TILE:
        operands = point_to_operands(program, matrices, TILING)
    # Epoch and group are asked for once the first weights are under way, because the compiler waits
    # at once for values that all threads share.
    epoch, group = il.next_epoch(epochs), il.join(ctx)
    if ONE_TILE:
        il.record("tile", program, group)
        part = multiply_tile(operands, matrices.K, TILING)
    stamp = il.mark(epoch, call)
    calls, slots = memory_of(memory.words, memory.half, epoch, tl.float32)
    target = slots + il.rank(group) * tl.multiple_of(memory.slot.to(tl.int64), 16)
    if program == 0:
        announce(calls, stamp, group, WORLD_SIZE)
    if ONE_TILE:
        _send(program, part, target, memory.line, group, matrices, WORLD_SIZE, TILING)
    else:
        for tile in range(program, tiles, producers):
            il.record("tile", tile, group)
            operands = point_to_operands(tile, matrices, TILING)
            part = multiply_tile(operands, matrices.K, TILING)
            _send(tile, part, target, memory.line, group, matrices, WORLD_SIZE, TILING)
    return epoch, group


@triton.jit
def _receive(
    inputs, outputs, N, B, memory, epochs, ctx, call, producers, WORLD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, FORM: tl.constexpr,
):
    """Add all ranks' parts of some columns, and normalise them.

    Returns:
        The call's epoch, and the value of ``il.join``.
    """
    receiver = tl.program_id(0) - producers
    token, section = receiver // FORM.sections, receiver % FORM.sections
    place = place_of(section, COLUMNS, token, N, B, COLUMNS, 1)
    # Residual and weights are loaded before the sums are there.
    loaded = load_inputs(inputs, place)
    epoch, group = il.next_epoch(epochs), il.join(ctx)
    stamp = il.mark(epoch, call)
    calls, slots = memory_of(memory.words, memory.half, epoch, tl.float32)
    slot = tl.multiple_of(memory.slot.to(tl.int64), 16)
    agreed = agree(calls, stamp, group, WORLD_SIZE)
    offsets = token * memory.line.to(tl.int64) + place.columns
    total = il.sum_lamport(
        slots + offsets, None, slot, stamp, receiver, group, place.inside, WORLD_SIZE
    )
    # Values that arrived from a rank in another call look like this call's.
    total = il.nan_unless(agreed, total)
    meeting = Meeting(calls + 16, B, stamp, receiver, group)
    norm_and_store(total, loaded, inputs, outputs, place, meeting, FORM)
    return epoch, group


@triton.jit
def _send(
    tile, part, slots, line, group, matrices, WORLD_SIZE: tl.constexpr, TILING: tl.constexpr,
):
    """Put a tile's partial sums into this rank's slot of every rank, ``[token][row]``."""
    rows, tokens, mask = tile_at(tile, matrices.N, matrices.B, TILING)
    # A token's rows lie next to one another, as its receivers read them.
    offsets = tokens[None, :] * line.to(tl.int64) + rows[:, None]
    rank = il.rank(group)
    # The next rank is the first to be sent to, so that ranks do not crowd one link.
    for step in tl.static_range(1, WORLD_SIZE + 1):
        il.put_lamport(slots + offsets, part, (rank + step) % WORLD_SIZE, group, mask)
