"""Dispatch: every slot's row goes to its expert's rank, which multiplies it by a weight.

The forward and the backward pass have a kernel each. In both, the first programs push rows, and the
others draw tiles of the product.
"""

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
    """

    programs: Any
    rows: Any
    block_rows: Any
    block_columns: Any
    top_k: Any
    align: Any


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
        first: Address of the first buffer (rank 0's copy), or of the only one.
        nbytes: Bytes of a buffer.
        grants: The index of the buffer that each rank grants; None if there is one buffer.
        scale_bytes: Bytes from a buffer's first row to its first scale; None if there are none.
    """

    first: Any
    nbytes: Any
    grants: Any
    scale_bytes: Any


class DrawnTiles(NamedTuple):
    """The tiles of this rank's experts, which programs draw from a ticket counter.

    Attributes:
        rows, begin: Rows of each expert, and the first of them in the buffer.
        tiles_m, ends: Tiles of rows of each expert, and the items up to its last one.
        tiles_n: Tiles of columns.
        items: Number of tiles of all experts.
        draws: Maximum number of items that a program draws.
    """

    rows: Any
    begin: Any
    tiles_m: Any
    ends: Any
    tiles_n: Any
    items: Any
    draws: Any


class Tile(NamedTuple):
    """A tile of the product: its expert, its first row, the expert's last row + 1, and its number
    among the tiles of columns.
    """

    expert: Any
    row: Any
    end: Any
    n: Any


class FirstProduct(NamedTuple):
    """The operands and results of the product with w_in, as descriptors or pointers; see
    :func:`dispatch_grouped_gemm`.
    """

    a: Any
    b: Any
    bias: Any
    out: Any
    kept: Any
    arrivals: Any
    columns: Any
    hidden: Any


@triton.jit
def _push(
    rows, plan, buffers, flags, group, stamp, LANES: tl.constexpr, PUSHING: tl.constexpr,
):
    """Send this program's share of the rows that leave, and signal complete experts.

    A program sends pieces of one expert each, experts in the order in which they are awaited.
    """
    WORLD_SIZE: tl.constexpr = LANES.world_size
    PUSH_ROWS: tl.constexpr = PUSHING.rows
    ROWS: tl.constexpr = PUSHING.block_rows
    COLS: tl.constexpr = PUSHING.block_columns
    E, L, hidden = plan.E, plan.L, rows.hidden
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
        buffer = buffers.first
        if buffers.grants is not None:
            buffer += tl.load(buffers.grants + owner).to(tl.int64) * buffers.nbytes
        target = il.pointer(buffer, rows.x.dtype.element_ty)
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


@triton.jit
def _tiles_to_draw(
    plan, columns, rank, LANES: tl.constexpr, PUSHING: tl.constexpr, TILING: tl.constexpr
):
    """Return the tiles of a product with ``columns`` columns."""
    rows, begin = local_experts(plan, rank, LANES.world_size, LANES.local)
    tiles_m = (rows + TILING.block_m - 1) // TILING.block_m
    tiles_n = (columns + TILING.block_n - 1) // TILING.block_n
    ends = tl.cumsum(tiles_m * tiles_n, 0)
    items = tl.sum(tiles_m) * tiles_n
    # There are enough draws for all items even if the programs that start only when the pushers
    # have left draw none.
    programs = tl.num_programs(0) - PUSHING.programs
    early = tl.where(programs > PUSHING.programs, programs - PUSHING.programs, programs)
    return DrawnTiles(rows, begin, tiles_m, ends, tiles_n, items, (items + early - 1) // early)


@triton.jit
def _draw_after(item, draw, ticket, tiles):
    """Draw the item that follows ``item``; return the number of items if there is none."""
    more = (draw + 1 < tiles.draws) & (item < tiles.items)
    drawn = tl.atomic_add(ticket, 1, mask=more, sem="relaxed", scope="gpu")
    return tl.where(more, drawn, tiles.items)


@triton.jit
def _tile_of_item(item, tiles, LANES: tl.constexpr, TILING: tl.constexpr):
    """Return the tile that an item stands for."""
    lanes = tl.arange(0, LANES.local)
    expert, m, n = tile_of(
        item, lanes, tiles.ends, tiles.tiles_m, tiles.rows * 0, tiles.tiles_n, TILING.group_m
    )
    first = pick(tiles.begin, lanes, expert)
    return Tile(expert, first + m * TILING.block_m, first + pick(tiles.rows, lanes, expert), n)


@triton.jit
def _await_rows(
    expert, plan, flags, stamp, rank, group, WORLD_SIZE: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """Wait for the rows of one of this rank's experts; return 0, or NaN if a source is missing."""
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
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
    product, tile, poison, item, group, DTYPE: tl.constexpr, TILING: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute a tile of gate and up, and store it, unless ``kept`` is None, and its activation."""
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    DESCRIPTORS: tl.constexpr = TILING.descriptors
    GATES: tl.constexpr = FORM.gates
    columns, hidden, row, end = product.columns, product.hidden, tile.row, tile.end
    width, column = columns // GATES, tile.n * (BLOCK_N // GATES)
    if FORM.halves:
        gate, up = multiply_halves(
            product.a, product.b, row, end, tile.expert, column, width, hidden, TILING
        )
        gate, up = poison + gate, poison + up
        if product.bias is not None:
            of_expert = product.bias + tile.expert * columns
            gate = add_bias(gate, of_expert, column, width)
            up = add_bias(up, of_expert + width, column, width)
    else:
        first = tile.n * BLOCK_N
        acc = poison + multiply(
            product.a, product.b, row, end, tile.expert, first, columns, hidden, TILING
        )
        if product.bias is not None:
            acc = add_bias(acc, product.bias + tile.expert * columns, first, columns)
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


@triton.jit(do_not_specialize=["call", "L", "hidden_groups"])
def dispatch_grouped_gemm(
    x, slot_at, plan, grants, a, b, bias, out, kept, ticket, buffers, signals, epochs, ctx, call,
    buffer_bytes, arrivals, L, columns, hidden_groups, LANES: tl.constexpr, PUSHING: tl.constexpr,
    TILING: tl.constexpr, FORM: tl.constexpr,
):
    """Send every slot's row of ``x`` to its expert's rank; compute the activation of gate and up of
    what arrives.

    ``b`` is ``[L, 2 F, hidden]``, the gate's rows before those of up if ``FORM.halves``, or else a
    row of each in turn (or ``[L, F, hidden]`` if experts have no gate), and ``bias``, unless it is
    None, ``[L, 2 F]`` in the same order. ``TILING.w_along_k`` says which of the last two dimensions
    of ``b`` is contiguous in memory. ``a`` is this rank's buffer, ``[arrivals, hidden]``; ``out``
    becomes the activation of both, ``[arrivals, F]``, and ``kept``, unless it is None, gate and up,
    ``[2, arrivals, F]``.

    **Protocol.**

    1. :func:`plan_call` has granted the buffers, and their indices are in ``grants``. Without every
       grant nothing is sent.
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
    DTYPE: tl.constexpr = x.dtype.element_ty
    pid = tl.program_id(0)
    _, stamp, group, rank = il.enter(epochs, ctx, call)
    flags = il.pointer(signals, tl.int32)
    hidden = hidden_groups * PUSHING.align
    arrival_plan = ArrivalPlan(plan, L * LANES.world_size, L)
    if pid < PUSHING.programs:
        # Step 2. Without every grant the buffers may still be in use.
        if completeness(plan, None, arrival_plan.E, LANES.world_size) > 0:
            rows = LeavingRows(x, slot_at, None, hidden)
            granted = Buffers(buffers, buffer_bytes, grants, None)
            _push(rows, arrival_plan, granted, flags, group, stamp, LANES, PUSHING)
    else:
        if TILING.descriptors:
            product = FirstProduct(a, b, bias, out, kept, arrivals, columns, hidden)
        else:
            both = None if kept is None else il.pointer(kept, DTYPE)
            product = FirstProduct(
                il.pointer(a, DTYPE), il.pointer(b, DTYPE), bias, il.pointer(out, DTYPE), both,
                arrivals, columns, hidden,
            )
        tiles = _tiles_to_draw(arrival_plan, columns, rank, LANES, PUSHING, TILING)
        item = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
        ready = -1
        poison = 0.0
        for draw in range(tiles.draws):
            following = _draw_after(item, draw, ticket, tiles)
            if item < tiles.items:
                tile = _tile_of_item(item, tiles, LANES, TILING)
                # Step 3.
                if tile.expert != ready:
                    poison = _await_rows(
                        tile.expert, arrival_plan, flags, stamp, rank, group, LANES.world_size,
                        TILING.descriptors,
                    )
                    ready = tile.expert
                il.record("tile", item, group)
                _activate_tile(product, tile, poison, item, group, DTYPE, TILING, FORM)
            item = following


@triton.jit(do_not_specialize=["call", "L", "hidden_groups"])
def dispatch_grouped_gemm_backward(
    grad, slot_at, scales, plan, a, b, out, ticket, met, buffer, signals, epochs, ctx, call,
    scale_bytes, L, columns, hidden_groups, LANES: tl.constexpr, PUSHING: tl.constexpr,
    TILING: tl.constexpr,
):
    """Send every slot's row of ``grad``, the gradient of y, to its expert's rank; multiply what
    arrives by w_out.

    Rows are accompanied by their slot's weight (``scales``). ``b`` is ``[L, columns, hidden]`` if
    ``TILING.w_along_k``, else ``[L, hidden, columns]``; ``a`` is this rank's ``buffer``, which has
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
    DTYPE: tl.constexpr = grad.dtype.element_ty
    WORLD_SIZE: tl.constexpr = LANES.world_size
    pid = tl.program_id(0)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    flags = il.pointer(signals, tl.int32)
    hidden = hidden_groups * PUSHING.align
    arrival_plan = ArrivalPlan(plan, L * WORLD_SIZE, L)
    if pid < PUSHING.programs:
        complete = completeness(plan, None, arrival_plan.E, WORLD_SIZE) > 0
        # Step 1. Two sets of grants take turns, as a peer may be one call ahead or behind.
        peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
        is_peer = (peers < WORLD_SIZE) & (peers != rank)
        granting = il.in_turn(flags, epoch, MAX_RANKS)
        if pid == 0:
            il.signal(granting + rank + peers * 0, stamp, peers, group, is_peer)
        complete = complete & il.wait(granting + peers, stamp, peers, 0, group, is_peer)
        if pid == 0:
            tl.store(met, complete.to(tl.int32))
        # Step 2. Without every grant the buffers may still be in use.
        if complete:
            rows = LeavingRows(grad, slot_at, scales, hidden)
            granted = Buffers(buffer, None, None, scale_bytes)
            _push(rows, arrival_plan, granted, flags, group, stamp, LANES, PUSHING)
    else:
        if TILING.descriptors:
            left, weight, target = a, b, out
        else:
            left, weight = il.pointer(a, DTYPE), il.pointer(b, DTYPE)
            target = il.pointer(out, DTYPE)
        tiles = _tiles_to_draw(arrival_plan, columns, rank, LANES, PUSHING, TILING)
        item = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
        ready = -1
        poison = 0.0
        for draw in range(tiles.draws):
            following = _draw_after(item, draw, ticket, tiles)
            if item < tiles.items:
                expert, row, end, n = _tile_of_item(item, tiles, LANES, TILING)
                # Step 3.
                if expert != ready:
                    poison = _await_rows(
                        expert, arrival_plan, flags, stamp, rank, group, WORLD_SIZE,
                        TILING.descriptors,
                    )
                    ready = expert
                il.record("tile", item, group)
                column = n * TILING.block_n
                acc = poison + multiply(
                    left, weight, row, end, expert, column, columns, hidden, TILING
                )
                il.record("computed", item, group)
                store_rows(target, row, end, column, columns, acc.to(DTYPE), TILING.descriptors)
            item = following
