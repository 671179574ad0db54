"""Kernels that take a product's rows to the norm of their sum over ranks."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.operators.gemm_all_reduce_norm.kernels.norm import (
    Form, Inputs, Outputs, load_inputs, norm_and_store, place_of,
)


@triton.jit(do_not_specialize=["landing", "signals", "call", "half", "eps"])
def sum_and_norm_rows(
    part, bias, residual, norm_weight, norm_bias, scale, y, new_residual, scales,
    landing, signals, epochs, ctx, call, half, N, B, eps,
    WORLD_SIZE: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr,
):
    """Compute ``h = sum over ranks of part, + bias, + residual``, and ``y = norm(h)``, row by row.

    **Protocol.** Program p has rows p, p + programs, ... of every rank. It puts its rows of this
    rank's part into ``landing [epoch % 2][rank][row]`` of every peer, meets the programs of its
    index on the other ranks, adds their parts in rank order, and normalises. A half may be written
    again two calls later: whoever meets a peer in the call in between knows that its kernel of this
    call has ended. With one rank nothing is put.

    **Example.** Two ranks, rows ``[1, 2]`` and ``[10, 20]``, residual ``[0, 2]``: both ranks store
    the residual ``[11, 24]`` and, of the root mean square 18.7, y = ``[0.59, 1.29]``.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    inputs = Inputs(bias, residual, norm_weight, norm_bias, scale, eps, N, B)
    outputs = Outputs(y, new_residual, scales)
    # Triton makes an argument of 1 a constant, which has no dtype.
    line = tl.zeros([], tl.int64) + N
    size = line * B
    half_address = landing + (epoch & 1).to(tl.int64) * half
    slots = il.pointer(half_address, part.dtype.element_ty)
    arrived = 1
    if WORLD_SIZE > 1:
        columns = tl.arange(0, COLUMNS)
        for row in range(program, B, programs):
            offsets = row * line + columns
            value = tl.load(part + offsets, mask=columns < N, other=0.0)
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (me + step) % WORLD_SIZE
                il.put(slots + me * size + offsets, value, peer, group, columns < N)
        flags = il.pointer(signals, tl.int32) + program * (2 * WORLD_SIZE)
        arrived = il.barrier(flags, stamp, group, WORLD_SIZE).to(tl.int32)
    for row in range(program, B, programs):
        place = place_of(0, 0, row, N, B, COLUMNS, 1)
        loaded = load_inputs(inputs, place)
        offsets = row * line + place.columns
        own = tl.load(part + offsets, mask=place.inside, other=0.0).to(tl.float32)
        total = tl.zeros(place.inside.shape, tl.float32)
        # A tile, because the interpreter turns a scalar condition into integers when it meets a
        # mask.
        own_rank = me + tl.zeros(place.inside.shape, tl.int32)
        for source in tl.static_range(WORLD_SIZE):
            if WORLD_SIZE == 1:
                total += own
            else:
                is_peer = place.inside & (source != own_rank)
                value = il.get(slots + source * size + offsets, me, group, is_peer, 0.0)
                total += tl.where(source == own_rank, own, value.to(tl.float32))
        total = il.nan_unless(arrived, total)
        norm_and_store(total, loaded, inputs, outputs, place, None, FORM)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["eps"])
def norm_rows(
    total, residual, norm_weight, norm_bias, scale, y, new_residual, scales, N, B, eps,
    COLUMNS: tl.constexpr, FORM: tl.constexpr,
):
    """Compute ``h = total + residual`` and ``y = norm(h)``, a program per row."""
    row = tl.program_id(0)
    inputs = Inputs(None, residual, norm_weight, norm_bias, scale, eps, N, B)
    place = place_of(0, 0, row, N, B, COLUMNS, 1)
    loaded = load_inputs(inputs, place)
    offsets = row.to(tl.int64) * N + place.columns
    value = tl.load(total + offsets, mask=place.inside, other=0.0).to(tl.float32)
    norm_and_store(
        value, loaded, inputs, Outputs(y, new_residual, scales), place, None, FORM
    )
