"""The forward kernels of groups that span nodes: vectors for other nodes leave in slices."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.operators.embedding_all_to_all.kernels.forward import Lookups, cells_of, pool
from interlace.operators.embedding_all_to_all.kernels.vectors import (
    COUNTER, DONE, MAX_RANKS, samples_of,
)

# Bytes behind a slice's vectors, which begin with the stamp of its call.
_STAMP_BYTES = tl.constexpr(16)


@triton.jit
def _stamp_at(slice_address, rows, row_bytes):
    """Return a pointer to the stamp behind ``rows`` rows of a slice."""
    nbytes = rows.to(tl.int64) * row_bytes
    end = (nbytes + _STAMP_BYTES - 1) // _STAMP_BYTES * _STAMP_BYTES
    return il.pointer(slice_address + end, tl.int32)


@triton.jit(
    do_not_specialize=[
        "buffers", "buffer_bytes", "buffer_index", "grants", "signals", "staging", "counters",
        "call", "B", "chunk", "T", "column_groups", "own_groups", "slice_blocks", "slice_bytes",
        "first_local",
    ]
)
def embedding_all_to_all_between_nodes(
    tables, indices, offsets, weights, ranks, buffers, grants, signals, staging, counters, epochs,
    ctx, call, buffer_bytes, buffer_index, B, chunk, T, column_groups, own_groups, slice_blocks,
    slice_bytes, first_local, WORLD_SIZE: tl.constexpr, REMOTE: tl.constexpr,
    POOLING: tl.constexpr, VECTORS: tl.constexpr,
):
    """Pool this rank's ``T`` tables for the entire batch: for other nodes' samples into slices, for
    this node's samples straight into their owners' outputs.

    ``ranks`` lists the ranks of other nodes in the order in which they are sent to, then the peers
    of this node, then this rank; ``first_local`` is the lowest rank of this node. A slice is
    ``slice_blocks`` blocks of samples of one destination, all tables: ``[samples, own columns]``,
    padded to 16 bytes, and then 16 bytes that begin with the stamp of the call.

    **Protocol.**

    1. Program 0 grants this rank's output to the peers of its node, as on one node.
    2. Programs pool the blocks for other nodes, slice by slice, all destinations of a slice in
       turn, into ``staging``. Each block that is stored is counted in its slice's counter, with
       release order: when the counter has reached the number of blocks of all destinations, the
       network takes the slice (:mod:`interlace.comm.slices`). Nobody waits here.
    3. Once the node's grants have arrived, the blocks for the node follow, as under ``direct``: the
       last program signals the node's peers, and the program of the highest index waits for them.

    What other nodes send arrives in a landing of this rank, which no kernel waits for: the stream
    does, before :func:`embedding_all_to_all_collect`.

    **Example.** Two nodes of one rank, a table of width 1 each, batch 4, slices of one sample. Rank
    0 pools a2 and counts, so that a2 leaves for rank 1; then a3, which leaves, too; then a0 and a1,
    which go to column 0 of its own output. Column 1 comes from rank 1's slices b0 and b1.
    """
    BAGS: tl.constexpr = POOLING.bags
    OUT: tl.constexpr = VECTORS.out_dtype
    OUT_BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    LOCAL: tl.constexpr = WORLD_SIZE - REMOTE
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    lookups = Lookups(tables, indices, offsets, weights, B)
    lanes = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    # The ranks of this node, by number; lanes of other ranks are never stored to.
    peers = tl.load(ranks + REMOTE + lanes, mask=lanes < LOCAL, other=first_local).to(tl.int32)
    is_peer = lanes < LOCAL - 1
    flags = il.pointer(signals, tl.int32)
    granting = il.in_turn(flags, epoch, MAX_RANKS)
    done = il.in_turn(flags + DONE, epoch, MAX_RANKS)
    grant_indices = il.in_turn(il.pointer(grants, tl.int32), epoch, MAX_RANKS)
    blocks = (chunk + BAGS - 1) // BAGS
    # The columns are products with ALIGN, whose divisor the compiler knows.
    columns, own_columns = column_groups * VECTORS.align, own_groups * VECTORS.align
    own_buffer = buffers + buffer_index.to(tl.int64) * buffer_bytes
    own_output = il.pointer(own_buffer + rank * tl.multiple_of(group[2], 16), OUT)
    # Step 1. The put comes before the signal, which releases it.
    if program == 0:
        zeros = tl.zeros_like(peers)
        il.put(grant_indices + rank + zeros, buffer_index + zeros, peers, group, is_peer)
        il.signal(granting + rank + zeros, stamp, peers, group, is_peer)

    # Step 2. The network takes longer than the node's links, so its blocks come first.
    slices = (blocks + slice_blocks - 1) // slice_blocks
    for task in range(program, slices * T * slice_blocks * REMOTE, programs):
        destination, rest = task % REMOTE, task // REMOTE
        member, table = rest % slice_blocks, rest // slice_blocks % T
        number = rest // slice_blocks // T
        dest = tl.load(ranks + destination).to(tl.int32)
        samples = samples_of(dest, B, chunk)
        first = (number * slice_blocks + member) * BAGS
        count = tl.minimum(samples - first, BAGS)
        if count > 0:
            total = pool(lookups, table, dest * chunk + first, count, POOLING, VECTORS).to(OUT)
            place = staging + (destination * slices + number).to(tl.int64) * slice_bytes
            cells, mask = cells_of(
                tables, table, member * BAGS, count, own_columns, BAGS, True, VECTORS
            )
            tl.store(il.pointer(place, OUT) + cells, total, mask=mask)
            if (table == 0) & (member == 0):
                rows = tl.minimum(samples - first, slice_blocks * BAGS)
                tl.store(_stamp_at(place, rows, own_columns * OUT_BYTES), stamp)
        il.count(il.pointer(counters, tl.int32) + number)

    # Step 3. Without every grant of the node nothing is stored to it.
    granted = il.wait(granting + peers, stamp, peers, 0, group, is_peer)
    indices_of_grants = il.get(grant_indices + peers, rank, group, is_peer, 0)
    target_index = tl.where(is_peer, indices_of_grants, buffer_index)
    tasks = tl.where(granted, LOCAL * T * blocks, 0)
    for task in range(program, tasks, programs):
        place, table, block = task % LOCAL, task // LOCAL // blocks, task // LOCAL % blocks
        dest = tl.load(ranks + REMOTE + place).to(tl.int32)
        count = tl.minimum(samples_of(dest, B, chunk) - block * BAGS, BAGS)
        if count > 0:
            first = dest * chunk + block * BAGS
            total = pool(lookups, table, first, count, POOLING, VECTORS).to(OUT)
            cells, mask = cells_of(tables, table, block * BAGS, count, columns, BAGS, False, VECTORS)
            index = tl.sum(tl.where(lanes == place, target_index, 0))
            target = il.pointer(buffers + index.to(tl.int64) * buffer_bytes, OUT)
            il.put(target + cells, total, dest, group, mask)
    if LOCAL > 1:
        if granted:
            # The last program has acquired the stores of all; its signals release them.
            counter = il.peer_pointer(flags + COUNTER, rank, group)
            if il.arrive_last(counter, program, programs):
                il.signal(done + rank + tl.zeros_like(peers), stamp, peers, group, is_peer)
        # It has the highest index, as programs that start later must not be kept from it.
        if program == programs - 1:
            arrived = granted & il.wait(done + peers, stamp, peers, 0, group, is_peer)
            if not arrived:
                il.fill_nan(own_output, samples_of(rank, B, chunk).to(tl.int64) * columns)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["output", "landing", "call", "samples", "slice_rows", "columns"])
def embedding_all_to_all_collect(
    sources, output, landing, epochs, ctx, call, samples, slice_rows, columns, REMOTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OUT: tl.constexpr,
):
    """Copy what other nodes have sent from the landing to its columns of this rank's output.

    ``sources`` has a row ``[rank, offset in the landing, columns, first column, bytes between
    slices]`` per rank of another node.

    **Protocol.** All slices have arrived, or the group is broken. Each slice carries the stamp of
    its sender's call behind its rows. A slice of another call is reported, and NaN takes its place;
    so it does if the group is broken.

    **Example.** Two nodes of one rank, four samples, slices of one sample: rank 0 finds b0 and b1
    in its landing, each with a stamp, and copies them to column 1 of its output.
    """
    # The kernel that has pooled was the last call: its epoch is the one before the next.
    stamp = il.mark(il.previous_epoch(il.next_epoch(epochs)), call)
    group = il.join(ctx)
    BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    blocks = (slice_rows + ROWS - 1) // ROWS
    slices = (samples + slice_rows - 1) // slice_rows
    broken = il.is_broken(group)
    for task in range(tl.program_id(0), REMOTE * slices * blocks, tl.num_programs(0)):
        source, rest = task % REMOTE, task // REMOTE
        number, block = rest // blocks, rest % blocks
        entry = sources + 5 * source
        width, first_column = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
        rows = tl.minimum(samples - number * slice_rows, slice_rows)
        place = landing + tl.load(entry + 1) + number.to(tl.int64) * tl.load(entry + 4)
        if (width > 0) & (block * ROWS < rows):
            seen = tl.load(_stamp_at(place, rows, width * BYTES), volatile=True)
            if (seen != stamp) & (broken == 0):
                il.report_late(group, tl.load(entry).to(tl.int32), number + 1, stamp, seen)
            is_right = ((seen == stamp) & (broken == 0)).to(tl.int32)
            line = (block * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
            for start in range(0, width, COLUMNS):
                column = (start + tl.arange(0, COLUMNS))[None, :]
                mask = (line < rows) & (column < width)
                value = tl.load(il.pointer(place, OUT) + line * width + column, mask=mask, other=0.0)
                target = il.pointer(output, OUT) + first_column + column
                target += (number * slice_rows + line) * columns
                tl.store(target, il.nan_unless(is_right, value), mask=mask)
