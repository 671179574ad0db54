"""Dispatch: every slot's row goes to its expert's rank, which multiplies it by a weight.

The forward and the backward pass have a kernel each. In both, the first programs push rows, and the
others draw tiles of the product.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.float8 import clamp_to_float8, scales_of_blocks, words_of_float8
from interlace.gemm.kernels.tiles import SCALED, Scales, add_bias
from interlace.language.sizes import next_power_of_2
from interlace.operators.mixture_of_experts.kernels.activation import activate
from interlace.operators.mixture_of_experts.kernels.plan import (
    ARRIVALS, COUNTERS, HEADER, MAX_RANKS, RETURNS, ArrivalPlan, completeness, local_experts, pick,
)
from interlace.operators.mixture_of_experts.kernels.tiles import (
    as_operand, multiply, multiply_gate_and_up, multiply_halves, store_rows, tile_of,
)


class RowPushing(NamedTuple):
    """The constants that say how rows are sent.

    Attributes:
        programs: Programs that send.
        rows: Rows of one expert that a program sends at a time.
        block_rows, block_columns: The tile that it loads and stores at a time.
        top_k: Experts that a token goes to.
        align: The elements, a power of two, that rows are a multiple of.
    """

    programs: Any
    rows: Any
    block_rows: Any
    block_columns: Any
    top_k: Any
    align: Any


class LeavingRows(NamedTuple):
    """The rows that leave, and the buffers that they arrive in.

    Attributes:
        x: Rows ``[tokens, width]``, of which each slot's leaves; float8 ones in words of four.
        slot_at: The slot of each row of results.
        scales: The slots' numbers that leave with the rows; None if there are none.
        block_scales: The scales of float8 rows' blocks, ``[tokens, hidden / 128]``, which leave
            with them; None of other rows.
        buffers: Address of the first buffer (rank 0's copy), or of the only one.
        nbytes: Bytes of a buffer.
        grants: The index of the buffer that each rank grants; None if there is one buffer.
        scale_bytes: Bytes from a buffer's first row to the first of the scales behind them, one for
            each row or each block of it; None if there are none.
    """

    x: Any
    slot_at: Any
    scales: Any
    block_scales: Any
    buffers: Any
    nbytes: Any
    grants: Any
    scale_bytes: Any


class BlockScales(NamedTuple):
    """The scales of the blocks of float8 operands and of a float8 result.

    Attributes:
        a: Address of those of the rows that arrive, ``[arrivals, hidden / 128]``.
        b: Those of the weight, ``[L, 2 F / 128, hidden / 128]``.
        out: Those of the result, ``[arrivals, F / 128]``.
    """

    a: Any
    b: Any
    out: Any


class ArrivingProduct(NamedTuple):
    """The operands and results of a product of rows that arrive, as descriptors or pointers; see
    :func:`dispatch_grouped_gemm`. Backward there is neither ``bias`` nor ``kept``, and ``scales``
    and ``out_scale``, those of the operands and of ``out``, are of float8 alone.
    """

    a: Any
    b: Any
    scales: Any
    bias: Any
    out: Any
    out_scale: Any
    kept: Any
    arrivals: Any
    columns: Any
    hidden: Any


@triton.jit
def _push(
    rows, width, plan, flags, group, stamp, LANES: tl.constexpr, PUSHING: tl.constexpr,
):
    """Send this program's share of the rows that leave, of so many elements each, and signal
    complete experts.

    A program sends pieces of one expert each, experts in the order in which they are awaited.
    """
    WORLD_SIZE: tl.constexpr = LANES.world_size
    PUSH_ROWS: tl.constexpr = PUSHING.rows
    ROWS: tl.constexpr = PUSHING.block_rows
    COLS: tl.constexpr = PUSHING.block_columns
    BLOCK: tl.constexpr = SCALED // 4  # words of float8 that share a scale
    E, L = plan.E, plan.L
    rank = il.rank(group)
    lanes = tl.arange(0, LANES.experts)
    # The neighbour's first expert first, then the next rank's: ranks do not crowd one of them.
    experts = (rank + 1 + lanes) % WORLD_SIZE * L + lanes // WORLD_SIZE
    counts = tl.load(plan.table + rank * E + experts, mask=lanes < E, other=0)
    pieces = (counts + PUSH_ROWS - 1) // PUSH_ROWS
    ends = tl.cumsum(pieces, 0)
    for task in range(tl.program_id(0), tl.sum(pieces), PUSHING.programs):
        i = tl.sum((ends <= task).to(tl.int32))
        owner, local = (rank + 1 + i) % WORLD_SIZE, i // WORLD_SIZE
        expert = owner * L + local
        count, members = pick(counts, lanes, i), pick(pieces, lanes, i)
        piece = task - pick(ends, lanes, i) + members
        arrival = tl.load(plan.table + (ARRIVALS * WORLD_SIZE + rank) * E + expert)
        back = tl.load(plan.table + (RETURNS * WORLD_SIZE + rank) * E + expert)
        buffer = rows.buffers
        if rows.grants is not None:
            buffer += tl.load(rows.grants + owner).to(tl.int64) * rows.nbytes
        target = il.pointer(buffer, rows.x.dtype.element_ty)
        for first in range(piece * PUSH_ROWS, tl.minimum(count, (piece + 1) * PUSH_ROWS), ROWS):
            row = first + tl.arange(0, ROWS)
            slot = tl.load(rows.slot_at + back + row, mask=row < count, other=0)
            # The offsets are products with the row's width, whose divisor the compiler knows.
            token = (slot // PUSHING.top_k).to(tl.int64)
            source, offset = token * width, (arrival + row).to(tl.int64) * width
            for start in range(0, width, COLS):
                column = start + tl.arange(0, COLS)[None, :]
                mask = (row < count)[:, None] & (column < width)
                value = tl.load(rows.x + source[:, None] + column, mask=mask)
                il.put(target + offset[:, None] + column, value, owner, group, mask)
                if rows.block_scales is not None:
                    block = (tl.arange(0, COLS // BLOCK) + start // BLOCK)[None, :]
                    has_block = (row < count)[:, None] & (block < width // BLOCK)
                    value = tl.load(
                        rows.block_scales + source[:, None] // BLOCK + block, mask=has_block
                    )
                    scale_target = il.pointer(buffer + rows.scale_bytes, tl.float32)
                    scale_target += offset[:, None] // BLOCK + block
                    il.put(scale_target, value, owner, group, has_block)
            if rows.scales is not None:
                scale = tl.load(rows.scales + slot, mask=row < count)
                scale_target = il.pointer(buffer + rows.scale_bytes, tl.float32)
                il.put(scale_target + arrival + row, scale, owner, group, row < count)
        # The last program of an expert has acquired the puts of the others, and its signal releases
        # them: an owner that has seen the signal reads complete rows.
        if il.arrive_last(il.peer_pointer(flags + COUNTERS + expert, rank, group), piece, members):
            il.signal(flags + HEADER + local * MAX_RANKS + rank, stamp, owner, group)


@triton.jit
def _draw_tiles(
    product, plan, ticket, flags, stamp, group, LANES: tl.constexpr, PUSHING: tl.constexpr,
    TILING: tl.constexpr, DTYPE: tl.constexpr, FORM: tl.constexpr,
):
    """Draw tiles of a product from a ticket counter, expert by expert, and compute each once its
    expert's rows have arrived.

    The tile, or its activation unless ``FORM`` is None, is stored.
    """
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    rank = il.rank(group)
    lanes = tl.arange(0, LANES.local)
    rows, begin = local_experts(plan, rank, LANES.world_size, LANES.local)
    tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
    # A tile of gate and up that becomes float8 has the lines of a block of their activation.
    LINES: tl.constexpr = 2 * SCALED if TILING.block_scales != "" else BLOCK_N
    tiles_n = (product.columns + LINES - 1) // LINES
    ends = tl.cumsum(tiles_m * tiles_n, 0)
    items = tl.sum(tiles_m) * tiles_n
    # There are enough draws for all items even if the programs that start only when the pushers
    # have left draw none.
    programs = tl.num_programs(0) - PUSHING.programs
    early = tl.where(programs > PUSHING.programs, programs - PUSHING.programs, programs)
    draws = (items + early - 1) // early
    item = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
    ready = -1
    poison = 0.0
    for draw in range(draws):
        # The next item is drawn before this one is computed, so that it arrives meanwhile.
        more = (draw + 1 < draws) & (item < items)
        drawn = tl.atomic_add(ticket, 1, mask=more, sem="relaxed", scope="gpu")
        if item < items:
            expert, m, n = tile_of(
                item, lanes, ends, tiles_m, rows * 0, tiles_n, TILING.group_m
            )
            first = pick(begin, lanes, expert)
            row, end = first + m * BLOCK_M, first + pick(rows, lanes, expert)
            if expert != ready:
                poison = _await_rows(
                    expert, plan, flags, stamp, rank, group, LANES.world_size, TILING.descriptors
                )
                ready = expert
            il.record("tile", item, group)
            if FORM is None:
                column = n * BLOCK_N
                acc = poison + multiply(
                    product.a, product.b, row, end, expert, column, product.columns,
                    product.hidden, TILING,
                )
                il.record("computed", item, group)
                store_rows(
                    product.out, row, end, column, product.columns, acc.to(DTYPE),
                    TILING.descriptors,
                )
            elif TILING.block_scales != "":
                _activate_block(
                    product, expert, row, end, n, poison, item, group, DTYPE, TILING, FORM
                )
            else:
                _activate_tile(
                    product, expert, row, end, n, poison, item, group, DTYPE, TILING, FORM
                )
        item = tl.where(more, drawn, items)


@triton.jit
def _await_rows(
    expert, plan, flags, stamp, rank, group, WORLD_SIZE: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """Wait for the rows of one of this rank's experts; return 0, or NaN if a source is missing."""
    peers = tl.arange(0, next_power_of_2(WORLD_SIZE))
    # Only sources that send rows to this expert signal.
    counts = plan.table + peers * plan.E + rank * plan.L + expert
    awaited = tl.load(counts, mask=peers < WORLD_SIZE, other=0) > 0
    arrived = il.wait(
        flags + HEADER + expert * MAX_RANKS + peers, stamp, peers, rank * plan.L + expert, group,
        awaited,
    )
    # Descriptors load through another proxy than the one that the wait orders.
    if DESCRIPTORS:
        il.accept_tiles()
    # Rows of a source that is missing may be those of an earlier call, so they become NaN.
    return tl.where(arrived, 0.0, float("nan"))


@triton.jit
def _activate_tile(
    product, expert, row, end, n, poison, item, group, DTYPE: tl.constexpr, TILING: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute a tile of gate and up, and store it, unless ``kept`` is None, and its activation."""
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    DESCRIPTORS: tl.constexpr = TILING.descriptors
    GATES: tl.constexpr = FORM.gates
    columns, hidden = product.columns, product.hidden
    width, column = columns // GATES, n * (BLOCK_N // GATES)
    if FORM.halves:
        gate, up = multiply_halves(
            product.a, product.b, row, end, expert, column, width, hidden, TILING
        )
        gate, up = poison + gate, poison + up
        if product.bias is not None:
            of_expert = product.bias + expert * columns
            gate = add_bias(gate, of_expert, column, width)
            up = add_bias(up, of_expert + width, column, width)
    else:
        first = n * BLOCK_N
        acc = poison + multiply(
            product.a, product.b, row, end, expert, first, columns, hidden, TILING
        )
        if product.bias is not None:
            acc = add_bias(acc, product.bias + expert * columns, first, columns)
    il.record("computed", item, group)
    if GATES == 1:
        gate, up = acc, None
    elif not FORM.halves:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
    active = activate(gate, up, FORM)
    if product.kept is not None:
        store_rows(product.kept, row, end, column, width, gate.to(DTYPE), DESCRIPTORS)
    if product.kept is not None and GATES == 2:
        up_row, up_end = product.arrivals + row, product.arrivals + end
        store_rows(product.kept, up_row, up_end, column, width, up.to(DTYPE), DESCRIPTORS)
    store_rows(product.out, row, end, column, width, active.to(DTYPE), DESCRIPTORS)


@triton.jit
def _activate_block(
    product, expert, row, end, n, poison, item, group, DTYPE: tl.constexpr, TILING: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute 128 columns of gate and up of float8 operands, and store their activation, rounded to
    ``DTYPE``, as float8 with a scale for each row.
    """
    width, blocks = product.columns // 2, product.columns // 2 // SCALED
    first = _half_block(product, expert, row, end, n, 0, poison, DTYPE, TILING, FORM)
    second = _half_block(product, expert, row, end, n, 1, poison, DTYPE, TILING, FORM)
    il.record("computed", item, group)
    larger = tl.maximum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)
    scale = scales_of_blocks(larger, 1)
    rows = row + tl.arange(0, TILING.block_m)
    exists = rows < end
    tl.store(product.out_scale + rows * blocks + n, scale, mask=exists)
    for half in tl.static_range(2):
        value = clamp_to_float8((first if half == 0 else second) / scale[:, None])
        words = (n * SCALED + half * (SCALED // 2)) // 4 + tl.arange(0, SCALED // 8)
        offsets = rows.to(tl.int64)[:, None] * (width // 4) + words[None, :]
        tl.store(product.out + offsets, words_of_float8(value), mask=exists[:, None])


@triton.jit
def _half_block(
    product, expert, row, end, n, half, poison, DTYPE: tl.constexpr, TILING: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return the activation of 64 columns of gate and up, float32, rounded to ``DTYPE``."""
    column, width = n * SCALED + half * (SCALED // 2), product.columns // 2
    if TILING.descriptors:
        gate, up = multiply_gate_and_up(
            product.a, product.b, row, end, expert, column, width, product.hidden, TILING,
            product.scales,
        )
    else:
        gate, up = multiply_halves(
            product.a, product.b, row, end, expert, column, width, product.hidden, TILING,
            product.scales,
        )
    return activate(poison + gate, poison + up, FORM).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["call", "L", "hidden_groups"])
def dispatch_grouped_gemm(
    rows, plan, a, b, scales, bias, out, kept, ticket, signals, epochs, ctx, call, arrivals, L,
    columns, hidden_groups, LANES: tl.constexpr, PUSHING: tl.constexpr, TILING: tl.constexpr,
    FORM: tl.constexpr, DTYPE: tl.constexpr,
):
    """Send every slot's row of ``rows.x`` to its expert's rank; compute the activation of gate and
    up of what arrives.

    ``b`` is ``[L, 2 F, hidden]``, the gate's rows before those of up if ``FORM.halves``, or else a
    row of each in turn (or ``[L, F, hidden]`` if experts have no gate), and ``bias``, unless it is
    None, ``[L, 2 F]`` in the same order. ``TILING.w_along_k`` says which of the last two dimensions
    of ``b`` is contiguous in memory. ``a`` is this rank's buffer, ``[arrivals, hidden]``; ``out``
    becomes the activation of both, ``[arrivals, F]``, and ``kept``, unless it is None, gate and up,
    ``[2, arrivals, F]``.

    With ``scales``, a :class:`BlockScales`, rows and ``b`` are float8, ``rows.x`` in words of four.
    The rows' scales arrive ``rows.scale_bytes`` behind the buffer's beginning, which is
    ``scales.a``. The activation, which is rounded to ``DTYPE`` first, is float8 then, too.

    **Protocol.**

    1. :func:`plan_call` has granted the buffers, and their indices are in ``rows.grants``. Without
       every grant nothing is sent.
    2. The first ``PUSHING.programs`` programs put rows straight into the granted buffer of their
       expert's rank, in the order (expert, source, slot). The program that completes an expert's
       rows of this rank signals their owner, ``[local expert][source]``.
    3. The other programs draw tiles from a ticket counter, expert by expert, and wait for the
       expert's sources before its first one.

    Pushers wait for nobody; the others wait for pushers, which have lower indices. An expert's
    signal has one set: it is set again after the grant of its reader, whose last call is over then.

    **Example.** The two ranks of :func:`plan_call`. Rank 0 puts slots 0 and 2 into rows 0 and 1 of
    rank 1's buffer and signals ``[0][0]`` there, then slot 1 into row 0 of its own. Rank 1 puts its
    slot into row 1 of rank 0's buffer, and computes expert 1 on rank 0's rows.
    """
    pid = tl.program_id(0)
    _, stamp, group, _ = il.enter(epochs, ctx, call)
    flags = il.pointer(signals, tl.int32)
    hidden = hidden_groups * PUSHING.align
    arrival_plan = ArrivalPlan(plan, L * LANES.world_size, L)
    if pid < PUSHING.programs:
        # Step 2. Without every grant the buffers may still be in use.
        if completeness(plan, None, arrival_plan.E, LANES.world_size) > 0:
            width = hidden if scales is None else il.multiple_of(hidden, SCALED) // 4
            _push(rows, width, arrival_plan, flags, group, stamp, LANES, PUSHING)
    else:
        # Step 3.
        OPERAND: tl.constexpr = DTYPE if scales is None else tl.float8e4nv
        left = as_operand(a, OPERAND, TILING.descriptors)
        right = as_operand(b, OPERAND, TILING.descriptors)
        both, of_operands, of_result = kept, None, None
        if kept is not None:
            both = as_operand(kept, DTYPE, TILING.descriptors)
        if scales is not None:
            of_operands = Scales(il.pointer(scales.a, tl.float32), scales.b, None, None)
            of_result, active = scales.out, il.pointer(out, tl.int32)
        else:
            active = as_operand(out, DTYPE, TILING.descriptors)
        product = ArrivingProduct(
            left, right, of_operands, bias, active, of_result, both, arrivals, columns, hidden
        )
        _draw_tiles(
            product, arrival_plan, ticket, flags, stamp, group, LANES, PUSHING, TILING, DTYPE, FORM
        )


@triton.jit(do_not_specialize=["call", "L", "hidden_groups"])
def dispatch_grouped_gemm_backward(
    rows, plan, a, b, out, ticket, met, signals, epochs, ctx, call, L, columns, hidden_groups,
    LANES: tl.constexpr, PUSHING: tl.constexpr, TILING: tl.constexpr,
):
    """Send every slot's row of ``rows.x``, the gradient of y, to its expert's rank; multiply what
    arrives by w_out.

    Rows are accompanied by their slot's weight (``rows.scales``). ``b`` is ``[L, columns, hidden]``
    if ``TILING.w_along_k``, else ``[L, hidden, columns]``; ``a`` is this rank's buffer, which has
    the same index on every rank; ``out`` becomes the product, ``[arrivals, columns]``.

    **Protocol.**

    1. Program 0 grants this rank's buffer to all peers with a signal, and notes in ``met`` whether
       all ranks have granted: later kernels put nothing if they have not.
    2. The first ``PUSHING.programs`` programs wait for all grants, and then put rows, as in
       :func:`dispatch_grouped_gemm`.
    3. The other programs multiply, as there.

    Pushers wait for the grants, which program 0 sends first of all; the others wait for pushers,
    which have lower indices.

    **Example.** The two ranks of :func:`dispatch_grouped_gemm`. Gradients take the way of the
    tokens, each with its slot's weight: rank 1's buffer gets rows 0 and 1 and two scales.
    """
    DTYPE: tl.constexpr = rows.x.dtype.element_ty
    WORLD_SIZE: tl.constexpr = LANES.world_size
    pid = tl.program_id(0)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    flags = il.pointer(signals, tl.int32)
    hidden = hidden_groups * PUSHING.align
    arrival_plan = ArrivalPlan(plan, L * WORLD_SIZE, L)
    if pid < PUSHING.programs:
        complete = completeness(plan, None, arrival_plan.E, WORLD_SIZE) > 0
        # Step 1. Two sets of grants take turns, as a peer may be one call ahead or behind.
        peers = tl.arange(0, next_power_of_2(WORLD_SIZE))
        is_peer = (peers < WORLD_SIZE) & (peers != rank)
        granting = il.in_turn(flags, epoch, MAX_RANKS)
        if pid == 0:
            il.signal(granting + rank + peers * 0, stamp, peers, group, is_peer)
        complete = complete & il.wait(granting + peers, stamp, peers, 0, group, is_peer)
        if pid == 0:
            tl.store(met, complete.to(tl.int32))
        # Step 2. Without every grant the buffers may still be in use.
        if complete:
            _push(rows, hidden, arrival_plan, flags, group, stamp, LANES, PUSHING)
    else:
        # Step 3.
        product = ArrivingProduct(
            as_operand(a, DTYPE, TILING.descriptors), as_operand(b, DTYPE, TILING.descriptors),
            None, None, as_operand(out, DTYPE, TILING.descriptors), None, None, None, columns,
            hidden,
        )
        _draw_tiles(
            product, arrival_plan, ticket, flags, stamp, group, LANES, PUSHING, TILING, DTYPE, None
        )
