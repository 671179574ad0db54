"""Kernels that take a product's rows to the norm of their sum over ranks."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.words import agree, announce
from interlace.gemm.kernels.lamport import end_call, memory_of
from interlace.operators.gemm_all_reduce.kernels.norm import (
    load_inputs, norm_and_store, place_of,
)


# Not for the number of rows either: a server has any, and would compile while it serves.
@triton.jit(do_not_specialize=["words", "call", "half", "B"])
def sum_and_norm_rows(
    part, inputs, outputs, words, epochs, ctx, call, half, N, B,
    WORLD_SIZE: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr,
):
    """Compute ``h = sum over ranks of part, + bias, + residual``, and ``y = norm(h)``, row by row.

    **Protocol.** Program p has rows p, p + programs, ... It puts its rows of this rank's part into
    the slot of this rank on every peer, all of them first, and then adds what the peers have put
    into its own slots, in rank order. Values show by themselves that they have arrived
    (:func:`il.sum_lamport`); the two halves of the slots take turns, as in
    :func:`multiply_sum_and_norm`. Values carry no mark, so one more program waits for a word of
    every rank that does, and makes y NaN if the ranks are in different calls.

    **Example.** Two ranks, rows ``[1, 2]`` and ``[10, 20]``, residual ``[0, 2]``: both ranks store
    the residual ``[11, 24]`` and, of the root mean square 18.7, y = ``[0.59, 1.29]``.
    """
    program, programs = tl.program_id(0), tl.num_programs(0) - 1
    N = il.multiple_of(N, FORM.factor)
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    calls, slots = memory_of(words, half, epoch, part.dtype.element_ty)
    if program == programs:
        announce(calls, stamp, group, WORLD_SIZE)
        if agree(calls, stamp, group, WORLD_SIZE) == 0:
            il.fill_nan(outputs.y, (tl.zeros([], tl.int64) + B) * N)
    else:
        # Triton makes an argument of 1 a constant, which has no dtype.
        line = tl.zeros([], tl.int64) + N
        size = (line * B + 15) // 16 * 16
        for row in range(program, B, programs):
            il.record("tile", row, group)
            place = place_of(0, 0, row, N, B, COLUMNS, 1)
            offsets = row * line + place.columns
            value = tl.load(part + offsets, mask=place.inside, other=0.0)
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (me + step) % WORLD_SIZE
                il.put_lamport(slots + me * size + offsets, value, peer, group, place.inside)
        # All rows have been sent before the first is awaited, so no two ranks wait for each other.
        for row in range(program, B, programs):
            place = place_of(0, 0, row, N, B, COLUMNS, 1)
            loaded = load_inputs(inputs, place)
            offsets = row * line + place.columns
            own = tl.load(part + offsets, mask=place.inside, other=0.0).to(tl.float32)
            total = il.sum_lamport(
                slots + offsets, own, size, stamp, row, group, place.inside, WORLD_SIZE
            )
            norm_and_store(total, loaded, inputs, outputs, place, None, FORM)
    end_call(words, half, epochs, epoch, group)


@triton.jit(do_not_specialize=["B"])
def norm_rows(total, inputs, outputs, N, B, COLUMNS: tl.constexpr, FORM: tl.constexpr):
    """Compute ``h = total + residual`` and ``y = norm(h)``, a program per row."""
    row = tl.program_id(0)
    N = il.multiple_of(N, FORM.factor)
    place = place_of(0, 0, row, N, B, COLUMNS, 1)
    loaded = load_inputs(inputs, place)
    offsets = row.to(tl.int64) * N + place.columns
    value = tl.load(total + offsets, mask=place.inside, other=0.0).to(tl.float32)
    norm_and_store(value, loaded, inputs, outputs, place, None, FORM)
