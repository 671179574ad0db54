"""The forward kernel: pooled vectors go straight to the ranks that own the samples."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.operators.embedding_all_to_all.kernels.vectors import (
    ADDRESS, COLUMN, COUNTER, DONE, FIELDS, MAX_RANKS, OWN_COLUMN, STRIDE, TABLE_WIDTH, TICKETS,
    samples_of, vectors_at,
)


class Pooling(NamedTuple):
    """The constants that say how a program pools a block of bags.

    Attributes:
        bags: Bags of one table and destination in a block.
        stages: Lookups of a bag that are under way at a time: the row of one is added while those
            of the others are loaded.
        mean: Whether a bag's sum is divided by its length.
    """

    bags: Any
    stages: Any
    mean: Any


class Lookups(NamedTuple):
    """The tables' records and the lookups: indices, bags' offsets, factors or None."""

    tables: Any
    indices: Any
    offsets: Any
    weights: Any


@triton.jit
def pool(lookups, B, table, first, count, POOLING: tl.constexpr, VECTORS: tl.constexpr):
    """Sum the ``count`` bags of ``table`` from sample ``first`` on: float32 ``[bags, width]``.

    Rows are added in the order of the indices.
    """
    BAGS: tl.constexpr = POOLING.bags
    STAGES: tl.constexpr = POOLING.stages
    DTYPE: tl.constexpr = tl.dtype(VECTORS.table_dtype)
    WIDTH: tl.constexpr = VECTORS.width
    ALIGN: tl.constexpr = VECTORS.align
    indices, weights = lookups.indices, lookups.weights
    entry = lookups.tables + table * FIELDS
    stride = tl.multiple_of(tl.load(entry + STRIDE), ALIGN)
    base = vectors_at(tl.load(entry + ADDRESS), DTYPE, ALIGN)
    bag = tl.arange(0, BAGS)
    columns = tl.arange(0, WIDTH)
    bounds = lookups.offsets + (B.to(tl.int64) * table + first) + bag
    start = tl.load(bounds, mask=bag < count, other=0).to(tl.int64)
    length = (tl.load(bounds + 1, mask=bag < count, other=0).to(tl.int64) - start).to(tl.int32)
    is_column = columns >= 0
    if not VECTORS.full:
        is_column = columns < tl.multiple_of(tl.load(entry + TABLE_WIDTH), ALIGN)
    longest = tl.max(length, 0)
    total = tl.zeros([BAGS, WIDTH], tl.float32)
    # Stages make loads asynchronous. Loads to registers, however far ahead they are written, are
    # put between the additions by ptxas, so that few of them are under way (decision 0006).
    for step in tl.range(0, longest, num_stages=STAGES):
        inside = step < length
        row = tl.load(indices + start + step, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & is_column[None, :]
        vector = tl.load(base + row[:, None] * stride + columns[None, :], mask=mask, other=0.0)
        if weights is None:
            total += vector.to(tl.float32)
        else:
            scale = tl.load(weights + start + step, mask=inside, other=0.0)
            total += vector.to(tl.float32) * scale.to(tl.float32)[:, None]
    if POOLING.mean:
        total = total / tl.maximum(length, 1).to(tl.float32)[:, None]
    return total


@triton.jit
def cells_of(
    tables, table, first, count, columns, BAGS: tl.constexpr, STAGED: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Return the offsets of a block's elements and their mask.

    The offsets are in the owner's output, or in the staged ``[samples, own columns]``.
    """
    ALIGN: tl.constexpr = VECTORS.align
    entry = tables + table * FIELDS
    bag, column = tl.arange(0, BAGS), tl.arange(0, VECTORS.width)
    corner = columns.to(tl.int64) * first + tl.load(entry + (OWN_COLUMN if STAGED else COLUMN))
    offsets = tl.multiple_of(corner, ALIGN) + bag[:, None] * columns + column[None, :]
    mask = (bag < count)[:, None] & (column >= 0)[None, :]
    if not VECTORS.full:
        width = tl.multiple_of(tl.load(entry + TABLE_WIDTH), ALIGN)
        mask = mask & (column < width)[None, :]
    return offsets, mask


@triton.jit
def _draw(tickets, tasks):
    """Return the first of the next ``tasks`` tasks that no program has.

    As programs draw all of them, it does not matter how many programs fit at once, nor how fast
    each one is.
    """
    return tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu") * tasks


@triton.jit(do_not_specialize=["output", "B", "T", "column_groups", "program_tasks"])
def pool_embeddings(
    lookups, output, B, T, column_groups, program_tasks, POOLING: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Pool this rank's ``T`` tables for the entire batch, without any other rank.

    Each program pools ``program_tasks`` blocks in a row, of ``bags`` bags of one table each.

    **Example.** A table of width 1, batch 2, blocks of one bag: programs 0 and 1 write [a0] and
    [a1], the rows of ``output``.
    """
    BAGS: tl.constexpr = POOLING.bags
    OUT: tl.constexpr = tl.dtype(VECTORS.out_dtype)
    columns = column_groups * VECTORS.align
    blocks = (B + BAGS - 1) // BAGS
    first = tl.program_id(0) * program_tasks
    for task in range(first, tl.minimum(first + program_tasks, T * blocks)):
        table, sample = task // blocks, task % blocks * BAGS
        count = tl.minimum(B - sample, BAGS)
        total = pool(lookups, B, table, sample, count, POOLING, VECTORS)
        cells, mask = cells_of(
            lookups.tables, table, sample, count, columns, BAGS, False, VECTORS
        )
        tl.store(il.pointer(output, OUT) + cells, total.to(OUT), mask=mask)


@triton.jit(
    do_not_specialize=[
        "buffers", "buffer_bytes", "buffer_index", "grants", "signals", "call", "B", "chunk", "T",
        "column_groups", "drawn_tasks",
    ]
)
def embedding_all_to_all_forward(
    lookups, buffers, grants, signals, epochs, ctx, call, buffer_bytes, buffer_index, B,
    chunk, T, column_groups, drawn_tasks, WORLD_SIZE: tl.constexpr, POOLING: tl.constexpr, VECTORS: tl.constexpr,
):
    """Pool this rank's ``T`` tables for the entire batch, each result straight into its output.

    The output belongs to the rank that owns the sample. A block is ``bags`` bags of one table and
    destination.

    **Protocol.**

    1. Every rank chooses a free buffer for its output. Program 0 *grants* it to every source: it
       puts the buffer's index into ``grants[rank]`` there and signals. So a rank that is not in
       this call yet receives nothing.
    2. Once all grants have arrived, programs draw blocks, ``drawn_tasks`` at a time: destinations
       in turn from the neighbour on, this rank being the last.
    3. The last program to have finished these blocks signals every destination.
    4. The program of the highest index waits, last of all, until all sources are done. No rank
       writes to a granted buffer after that: this rank's stream goes on, and the next grant of the
       buffer is made when its tensor has been freed.

    A peer may be one call ahead or behind, so grants, their indices and DONE have two sets. Tickets
    have two sets as well, as the next call's must be 0 when it begins: program 0 clears them, which
    no program of this call uses.

    No program waits for a program that waits, other than for program 0's grants, which are made
    first of all.

    **Example.** Two ranks with a table of width 1 each, batch 2. Rank 0 pools bags [a0, a1], rank 1
    [b0, b1]. Rank 0 writes a1 to column 0 of rank 1's output, then a0 to column 0 of its own; rank
    1 writes b0 to column 1 of rank 0's, then b1. Outputs: ``[[a0, b0]]`` and ``[[a1, b1]]``.
    """
    BAGS: tl.constexpr = POOLING.bags
    OUT: tl.constexpr = tl.dtype(VECTORS.out_dtype)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    peers, is_peer = il.other_ranks(rank, WORLD_SIZE)
    flags = il.pointer(signals, tl.int32)
    # Two sets of signals take turns, as a peer may be one call ahead or behind.
    granting = il.in_turn(flags, epoch, MAX_RANKS)
    done = il.in_turn(flags + DONE, epoch, MAX_RANKS)
    grant_indices = il.in_turn(il.pointer(grants, tl.int32), epoch, MAX_RANKS)
    blocks = (chunk + BAGS - 1) // BAGS
    # A product with ALIGN, whose divisor the compiler knows.
    columns = column_groups * VECTORS.align
    own_buffer = buffers + buffer_index.to(tl.int64) * buffer_bytes
    own_output = il.pointer(own_buffer + rank * tl.multiple_of(group[2], 16), OUT)
    counters = il.peer_pointer(flags, rank, group)
    tickets = il.in_turn(counters + TICKETS, epoch, 1)
    # Step 1. The put comes before the signal, which releases it: a source that has seen the signal
    # reads the buffer's index of this call.
    if program == 0:
        zeros = tl.zeros_like(peers)
        il.put(grant_indices + rank + zeros, buffer_index + zeros, peers, group, is_peer)
        il.signal(granting + rank + zeros, stamp, peers, group, is_peer)
        tl.store(il.in_turn(counters + TICKETS, epoch + 1, 1), 0)

    drawn = _draw(tickets, drawn_tasks)
    # Step 2. Without every grant nothing is stored: memory that was not granted may be in use.
    granted = il.wait(granting + peers, stamp, peers, 0, group, is_peer)
    indices_of_grants = il.get(grant_indices + peers, rank, group, is_peer, 0)
    target_index = tl.where(peers == rank, buffer_index, indices_of_grants)
    end = tl.where(granted, WORLD_SIZE * T * blocks, 0)
    while drawn < end:
        for task in range(drawn, tl.minimum(drawn + drawn_tasks, end)):
            dest = (rank + 1 + task % WORLD_SIZE) % WORLD_SIZE
            table, block = task // WORLD_SIZE // blocks, task // WORLD_SIZE % blocks
            samples = samples_of(dest, B, chunk)
            count = tl.minimum(samples - block * BAGS, BAGS)
            if count > 0:
                first = dest * chunk + block * BAGS
                il.record("tile", task, group)
                total = pool(lookups, B, table, first, count, POOLING, VECTORS).to(OUT)
                il.record("computed", task, group)
                cells, mask = cells_of(
                    lookups.tables, table, block * BAGS, count, columns, BAGS, False, VECTORS
                )
                index = tl.sum(tl.where(peers == dest, target_index, 0))
                target = il.pointer(buffers + index.to(tl.int64) * buffer_bytes, OUT)
                il.put(target + cells, total, dest, group, mask)
        drawn = _draw(tickets, drawn_tasks)
    if granted:
        # Step 3. The last program has acquired the stores of all; its signals release them.
        if il.arrive_last(counters + COUNTER, program, programs):
            il.signal(done + rank + tl.zeros_like(peers), stamp, peers, group, is_peer)
    # Step 4. One program waits for all sources, so the kernel does not end before they are done. It
    # has the highest index, as programs that start later must not be kept from it.
    if program == programs - 1:
        complete = il.wait(done + peers, stamp, peers, 0, group, is_peer)
        arrived = granted & complete
        # A source that did not arrive in time has left the output incomplete.
        if not arrived:
            il.fill_nan(own_output, samples_of(rank, B, chunk).to(tl.int64) * columns)
    il.advance_epoch(epochs, epoch)
