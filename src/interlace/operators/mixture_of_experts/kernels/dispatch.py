"""Dispatch: every slot's row goes to its expert's rank, which multiplies it by a weight."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.tiles import add_bias
from interlace.operators.mixture_of_experts.kernels.activation import activate
from interlace.operators.mixture_of_experts.kernels.plan import (
    ARRIVALS, COUNTERS, HEADER, MAX_RANKS, RETURNS, ArrivalPlan, completeness, local_experts, pick,
)
from interlace.operators.mixture_of_experts.kernels.tiles import (
    multiply, multiply_halves, store_rows, tile_of,
)


class RowPushing(NamedTuple):
    """The constants that say how rows are sent.

    Attributes:
        programs: Programs that send.
        rows: Rows of one expert that a program sends at a time.
        block_rows, block_columns: The tile that it loads and stores at a time.
        top_k: Experts that a token goes to.
        align: The elements, a power of two, that rows are a multiple of.
        expert_lanes: A power of two that is at least the number of experts.
    """

    programs: Any
    rows: Any
    block_rows: Any
    block_columns: Any
    top_k: Any
    align: Any
    expert_lanes: Any


class LeavingRows(NamedTuple):
    """The rows that leave: ``x [tokens, hidden]``, the slot of each row, the slots' scales or None.
    """

    x: Any
    slot_at: Any
    scales: Any
    hidden: Any


class Buffers(NamedTuple):
    """The buffers that rows arrive in.

    Attributes:
        first: Address of the first buffer (rank 0's copy).
        nbytes: Bytes of a buffer.
        scale_bytes: Bytes from a buffer's first row to its first scale.
        index: The buffer that this rank grants.
        grants: The buffer that each rank grants; None if all grant the same index.
    """

    first: Any
    nbytes: Any
    scale_bytes: Any
    index: Any
    grants: Any


@triton.jit
def _push(
    rows, plan, buffers, flags, group, stamp, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr,
    PUSHING: tl.constexpr,
):
    """Send this program's share of the rows that leave, and signal complete experts.

    A program sends pieces of one expert each, experts in the order in which they are awaited.
    """
    PUSH_ROWS: tl.constexpr = PUSHING.rows
    ROWS: tl.constexpr = PUSHING.block_rows
    COLS: tl.constexpr = PUSHING.block_columns
    E, L, hidden = plan.E, plan.L, rows.hidden
    rank = il.rank(group)
    lanes = tl.arange(0, PUSHING.expert_lanes)
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
        index = buffers.index if buffers.grants is None else tl.load(buffers.grants + owner)
        buffer = buffers.first + index.to(tl.int64) * buffers.nbytes
        target = il.pointer(buffer, DTYPE)
        for first in range(piece * PUSH_ROWS, tl.minimum(count, (piece + 1) * PUSH_ROWS), ROWS):
            row = first + tl.arange(0, ROWS)
            slot = tl.load(rows.slot_at + back + row, mask=row < count, other=0)
            # The offsets are products with the row's width, whose divisor the compiler knows.
            source = (slot // PUSHING.top_k).to(tl.int64) * hidden
            offset = (arrival + row).to(tl.int64) * hidden
            for start in range(0, hidden, COLS):
                column = start + tl.arange(0, COLS)[None, :]
                mask = (row < count)[:, None] & (column < hidden)
                value = tl.load(rows.x + source[:, None] + column, mask=mask)
                il.put(target + offset[:, None] + column, value, owner, group, mask)
            if rows.scales is not None:
                scale = tl.load(rows.scales + slot, mask=row < count)
                scale_target = il.pointer(buffer + buffers.scale_bytes, tl.float32)
                il.put(scale_target + arrival + row, scale, owner, group, row < count)
        # The last program of an expert has acquired the puts of the others, and its signal releases
        # them: an owner that has seen the signal reads complete rows.
        if il.arrive_last(il.peer_pointer(flags + COUNTERS + expert, rank, group), piece, members):
            il.signal(flags + HEADER + local * MAX_RANKS + rank, stamp, owner, group)


@triton.jit(do_not_specialize=["call", "buffer_index", "E", "L", "hidden_groups"])
def dispatch_grouped_gemm(
    x, slot_at, scales, plan, grants, a_tiles, b, bias, out, kept, ticket, met, buffers, signals,
    epochs, ctx, call, buffer_bytes, scale_bytes, buffer_index, arrivals, E, L, columns,
    hidden_groups, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, PUSHING: tl.constexpr,
    TILING: tl.constexpr, L_LANES: tl.constexpr, HALVES: tl.constexpr, FORM: tl.constexpr,
):
    """Send every slot's row of ``x`` to its expert's rank; multiply what arrives by the weights.

    Forward, which is where ``grants`` are given, ``b`` is ``[L, 2 F, hidden]``, the gate's rows
    before those of up if ``HALVES``, or else a row of each in turn (or ``[L, F, hidden]`` if
    experts have no gate), and ``bias``, unless it is None, ``[L, 2 F]`` in the same order; ``out``
    becomes the activation of both, ``[arrivals, F]``, and ``kept``, unless it is None, gate and up,
    ``[2, arrivals, F]``. Backward, ``x`` is the output's gradient, ``b`` is ``[L, hidden, F]``,
    rows are accompanied by their slot's weight (``scales``), and the product is stored as it is.
    ``TILING.w_along_k`` says which of the last two dimensions of ``b`` is contiguous in memory.

    **Protocol.**

    1. Backward, program 0 grants this rank's buffer to all peers with a signal, and notes in
       ``met`` whether all ranks have granted: later kernels put nothing if they have not. Forward,
       :func:`plan_call` has granted the buffers.
    2. The first ``PUSHING.programs`` programs put rows straight into the granted buffer of their
       expert's rank, in the order (expert, source, slot). The program that completes an expert's
       rows of this rank signals their owner, ``[local expert][source]``.
    3. The other programs draw tiles from a ticket counter, expert by expert, and wait for the
       expert's sources before its first one.

    Pushers wait for nobody (backward, for the grants, which program 0 sends first of all); the
    others wait for pushers, which have lower indices. An expert's signal has one set: it is set
    again after the grant of its reader, whose last call is over then.

    **Example.** The two ranks of :func:`plan_call`. Rank 0 puts slots 0 and 2 into rows 0 and 1 of
    rank 1's buffer and signals ``[0][0]`` there, then slot 1 into row 0 of its own. Rank 1 puts its
    slot into row 1 of rank 0's buffer, and computes expert 1 on rank 0's rows.
    """
    FORWARD: tl.constexpr = grants is not None
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    DESCRIPTORS: tl.constexpr = TILING.descriptors
    GROUP: tl.constexpr = TILING.group_m
    PUSHERS: tl.constexpr = PUSHING.programs
    R_LANES: tl.constexpr = triton.next_power_of_2(WORLD_SIZE)
    program = tl.program_id(0)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    peers = tl.arange(0, R_LANES)
    flags = il.pointer(signals, tl.int32)
    hidden = hidden_groups * PUSHING.align
    the_plan = ArrivalPlan(plan, E, L)
    if program < PUSHERS:
        granted = completeness(plan, None, E, WORLD_SIZE) > 0
        if not FORWARD:
            # Step 1. Two sets of grants take turns, as a peer may be one call ahead or behind.
            is_peer = (peers < WORLD_SIZE) & (peers != rank)
            granting = il.in_turn(flags, epoch, MAX_RANKS)
            if program == 0:
                il.signal(granting + rank + peers * 0, stamp, peers, group, is_peer)
            granted = granted & il.wait(granting + peers, stamp, peers, 0, group, is_peer)
            if program == 0:
                tl.store(met, granted.to(tl.int32))
        # Step 2. Without every grant nothing is sent: the buffers may still be in use.
        if granted:
            leaving = LeavingRows(x, slot_at, scales, hidden)
            the_buffers = Buffers(buffers, buffer_bytes, scale_bytes, buffer_index, grants)
            _push(
                leaving, the_plan, the_buffers, flags, group, stamp, WORLD_SIZE, DTYPE, PUSHING
            )
    else:
        lanes = tl.arange(0, L_LANES)
        rows, begin = local_experts(the_plan, rank, WORLD_SIZE, L_LANES)
        tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
        tiles_n = (columns + BLOCK_N - 1) // BLOCK_N
        ends = tl.cumsum(tiles_m * tiles_n, 0)
        items = tl.sum(tiles_m) * tiles_n
        if DESCRIPTORS:
            a, weight, target, both = a_tiles, b, out, kept
        else:
            own_buffer = buffers + buffer_index.to(tl.int64) * buffer_bytes
            a = il.pointer(own_buffer + rank * tl.multiple_of(group[2], 16), DTYPE)
            weight, target = il.pointer(b, DTYPE), il.pointer(out, DTYPE)
            both = None if kept is None else il.pointer(kept, DTYPE)
        # There are enough draws for all items even if the programs that start only when the pushers
        # have left draw none.
        programs = tl.num_programs(0) - PUSHERS
        early = tl.where(programs > PUSHERS, programs - PUSHERS, programs)
        draws = (items + early - 1) // early
        item = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
        ready = -1
        poison = 0.0
        for draw in range(draws):
            more = (draw + 1 < draws) & (item < items)
            drawn = tl.atomic_add(ticket, 1, mask=more, sem="relaxed", scope="gpu")
            following = tl.where(more, drawn, items)
            if item < items:
                expert, m, n = tile_of(item, lanes, ends, tiles_m, rows * 0, tiles_n, GROUP)
                # Step 3. Only sources that send rows to this expert signal.
                if expert != ready:
                    awaited = tl.load(
                        plan + peers * E + rank * L + expert, mask=peers < WORLD_SIZE, other=0
                    ) > 0
                    arrived = il.wait(
                        flags + HEADER + expert * MAX_RANKS + peers, stamp, peers,
                        rank * L + expert, group, awaited
                    )
                    # Descriptors load through another proxy than the one that the wait orders.
                    if DESCRIPTORS:
                        il.accept_tiles()
                    # Rows of a source that is missing may be those of an earlier call, so they
                    # become NaN.
                    poison = tl.where(arrived, 0.0, float("nan"))
                    ready = expert
                first = pick(begin, lanes, expert)
                row, end = first + m * BLOCK_M, first + pick(rows, lanes, expert)
                il.record("tile", item, group)
                if FORWARD and HALVES:
                    gate, up = multiply_halves(
                        a, weight, row, end, expert, n * (BLOCK_N // 2), columns // 2, hidden,
                        TILING,
                    )
                    gate, up = poison + gate, poison + up
                    if bias is not None:
                        of_expert = bias + expert * columns
                        width, column = columns // 2, n * (BLOCK_N // 2)
                        gate = add_bias(gate, of_expert, column, width)
                        up = add_bias(up, of_expert + width, column, width)
                else:
                    total = poison + multiply(
                        a, weight, row, end, expert, n * BLOCK_N, columns, hidden, TILING
                    )
                    if bias is not None:
                        total = add_bias(total, bias + expert * columns, n * BLOCK_N, columns)
                il.record("computed", item, group)
                if FORWARD:
                    GATES: tl.constexpr = FORM.gates
                    if GATES == 1:
                        gate, up = total, None
                    elif not HALVES:
                        gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
                    active = activate(gate, up, FORM)
                    width, column = columns // GATES, n * (BLOCK_N // GATES)
                    if kept is not None:
                        store_rows(both, row, end, column, width, gate.to(DTYPE), DESCRIPTORS)
                    if kept is not None and GATES == 2:
                        up_row, up_end = arrivals + row, arrivals + end
                        store_rows(both, up_row, up_end, column, width, up.to(DTYPE), DESCRIPTORS)
                    store_rows(target, row, end, column, width, active.to(DTYPE), DESCRIPTORS)
                else:
                    value = total.to(DTYPE)
                    store_rows(target, row, end, n * BLOCK_N, columns, value, DESCRIPTORS)
            item = following
