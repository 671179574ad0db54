"""The forward kernels of groups that span nodes: vectors for other nodes leave in slices."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.language.sizes import next_power_of_2
from interlace.operators.embedding_all_to_all.kernels.forward import cells_of, pool
from interlace.operators.embedding_all_to_all.kernels.vectors import DONE, MAX_RANKS, samples_of

# Bytes behind a slice's vectors, which begin with the stamp of its call.
_STAMP_BYTES = tl.constexpr(16)


class RanksByNode(NamedTuple):
    """The constants that say how many ranks there are, and how many of them on other nodes."""

    world_size: Any
    remote: Any


class SlicedMemory(NamedTuple):
    """The addresses of the memory that a launch which pools writes.

    Sizes are no part of it: Triton makes a member that is 1 a constant.

    Attributes:
        buffers: Rank 0's copy of the first buffer of outputs.
        grants: The indices of the buffers that peers of the node have granted.
        signals: The signals of the node's ranks.
        staging: The slices that leave for other nodes.
        counters: The number of blocks that are there, of each slice.
    """

    buffers: Any
    grants: Any
    signals: Any
    staging: Any
    counters: Any


@triton.jit
def _stamp_at(slice_address, rows, row_bytes):
    """Return a pointer to the stamp behind ``rows`` rows of a slice."""
    nbytes = rows.to(tl.int64) * row_bytes
    end = (nbytes + _STAMP_BYTES - 1) // _STAMP_BYTES * _STAMP_BYTES
    return il.pointer(slice_address + end, tl.int32)


@triton.jit
def _node(ranks, first_local, REMOTE: tl.constexpr, LOCAL: tl.constexpr, LANES: tl.constexpr):
    """Return the ranks of this node, this rank the last of them, and which of them are peers.

    Lanes beyond them have the rank ``first_local``, and are never stored to.
    """
    lanes = tl.arange(0, LANES)
    mask = lanes < LOCAL
    peers = tl.load(ranks + REMOTE + lanes, mask=mask, other=first_local).to(tl.int32)
    return peers, lanes < LOCAL - 1


@triton.jit(
    do_not_specialize=[
        "call", "buffer_bytes", "buffer_index", "B", "chunk", "T", "column_groups", "own_groups",
        "first_blocks", "first_bytes", "slice_blocks", "slice_bytes", "first_local", "tasks",
        "program_tasks",
    ]
)
def embedding_all_to_all_between_nodes(
    lookups, ranks, memory, epochs, ctx, call, buffer_bytes, buffer_index, B, chunk, T,
    column_groups, own_groups, first_blocks, first_bytes, slice_blocks, slice_bytes, first_local,
    tasks, program_tasks, RANKS: tl.constexpr, POOLING: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Pool this rank's ``T`` tables for the entire batch: for other nodes' samples into slices, for
    this node's samples straight into their owners' outputs.

    ``ranks`` lists the ranks of other nodes in the order in which they are sent to, then the peers
    of this node, then this rank; ``first_local`` is the lowest rank of this node. A slice is
    ``slice_blocks`` blocks of samples of one destination, all tables, and the first one
    ``first_blocks``: ``[samples, own columns]``, padded to 16 bytes, and then 16 bytes that begin
    with the stamp of the call; ``slice_bytes`` in all, and ``first_bytes``.

    There are ``tasks`` in all, of which each program computes ``program_tasks`` in a row: many short
    programs, started in their order, so that the network's kernel, which is of higher priority,
    finds room between them.

    **Protocol.**

    1. Program 0 grants this rank's output to the peers of its node, as on one node.
    2. Tasks pool the blocks for other nodes, slice by slice, all destinations of a slice in turn,
       into ``staging``. Each block that is stored is counted in its slice's counter, with release
       order: when the counter has reached the number of blocks of all destinations, the network
       takes the slice (:mod:`interlace.comm.groups.slices`). No program waits here.
    3. The blocks for the node follow, as on one node, once the node's grants have arrived.
    4. :func:`embedding_all_to_all_close` announces them to the node.

    Data of other nodes arrive in a landing of this rank. No kernel waits for them; the stream does,
    before :func:`embedding_all_to_all_collect`.

    **Example.** Two nodes of one rank, a table of width 1 each, batch 4, slices of one sample. Rank
    0 pools a2 and counts, so that a2 leaves for rank 1; then a3, which leaves, too; then a0 and a1,
    which go to column 0 of its own output. Column 1 comes from rank 1's slices b0 and b1.
    """
    BAGS: tl.constexpr = POOLING.bags
    OUT: tl.constexpr = tl.dtype(VECTORS.out_dtype)
    OUT_BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    REMOTE: tl.constexpr = RANKS.remote
    LOCAL: tl.constexpr = RANKS.world_size - REMOTE
    LANES: tl.constexpr = next_power_of_2(RANKS.world_size)
    # Launches may have more programs than epochs have cells, which are all equal meanwhile.
    stamp = il.mark(tl.load(epochs, volatile=True), call)
    group = il.join(ctx)
    rank = il.rank(group)
    peers, is_peer = _node(ranks, first_local, REMOTE, LOCAL, LANES)
    flags = il.pointer(memory.signals, tl.int32)
    granting = il.in_turn(flags, stamp, MAX_RANKS)
    grant_indices = il.in_turn(il.pointer(memory.grants, tl.int32), stamp, MAX_RANKS)
    blocks = (chunk + BAGS - 1) // BAGS
    # The columns are products with ALIGN, whose divisor the compiler knows.
    columns, own_columns = column_groups * VECTORS.align, own_groups * VECTORS.align
    first = tl.program_id(0) * program_tasks
    last = tl.minimum(first + program_tasks, tasks)
    # Step 1. The put comes before the signal, which releases it.
    if (first == 0) & (LOCAL > 1):
        zeros = tl.zeros_like(peers)
        il.put(grant_indices + rank + zeros, buffer_index + zeros, peers, group, is_peer)
        il.signal(granting + rank + zeros, stamp, peers, group, is_peer)

    # Step 2. The network takes longer than the node's links, so its blocks come first.
    further = (tl.maximum(blocks - first_blocks, 0) + slice_blocks - 1) // slice_blocks
    destination_bytes = first_bytes.to(tl.int64) + further.to(tl.int64) * slice_bytes
    first_tasks = T * first_blocks
    remote_tasks = (first_tasks + further * T * slice_blocks) * REMOTE
    for task in range(first, tl.minimum(last, remote_tasks)):
        destination, rest = task % REMOTE, task // REMOTE
        is_first = rest < first_tasks
        size = tl.where(is_first, first_blocks, slice_blocks)
        behind = tl.where(is_first, rest, rest - first_tasks)
        # The slice among those that are not the first, and the task within its slice.
        later, within = behind // (T * size), behind % (T * size)
        member, table = within % size, within // size
        number = tl.where(is_first, 0, later + 1)
        block = tl.where(is_first, 0, first_blocks + later * slice_blocks) + member
        dest = tl.load(ranks + destination).to(tl.int32)
        samples = samples_of(dest, B, chunk)
        sample = block * BAGS
        count = tl.minimum(samples - sample, BAGS)
        if count > 0:
            total = pool(lookups, B, table, dest * chunk + sample, count, POOLING, VECTORS).to(OUT)
            place = memory.staging + destination * destination_bytes
            place += tl.where(is_first, 0, first_bytes + later.to(tl.int64) * slice_bytes)
            cells, mask = cells_of(
                lookups.tables, table, member * BAGS, count, own_columns, BAGS, True, VECTORS
            )
            tl.store(il.pointer(place, OUT) + cells, total, mask=mask)
            # One task of each slice writes the stamp, and its count below releases it together with
            # the block.
            if (table == 0) & (member == 0):
                rows = tl.minimum(samples - sample, size * BAGS)
                tl.store(_stamp_at(place, rows, own_columns * OUT_BYTES), stamp)
        # Blocks without samples are counted, too: the network waits for the same number of blocks
        # whatever each destination's share of the batch is.
        il.count(il.pointer(memory.counters, tl.int32) + number)

    # Step 3. Without every grant of the node nothing is stored to it.
    if last > remote_tasks:
        granted = il.wait(granting + peers, stamp, peers, 0, group, is_peer)
        indices_of_grants = il.get(grant_indices + peers, rank, group, is_peer, 0)
        target_index = tl.where(is_peer, indices_of_grants, buffer_index)
        end = tl.where(granted, last, 0)
        for task in range(tl.maximum(first, remote_tasks), end):
            local = task - remote_tasks
            place, table, block = local % LOCAL, local // LOCAL // blocks, local // LOCAL % blocks
            dest = tl.load(ranks + REMOTE + place).to(tl.int32)
            count = tl.minimum(samples_of(dest, B, chunk) - block * BAGS, BAGS)
            if count > 0:
                sample = dest * chunk + block * BAGS
                total = pool(lookups, B, table, sample, count, POOLING, VECTORS).to(OUT)
                cells, mask = cells_of(
                    lookups.tables, table, block * BAGS, count, columns, BAGS, False, VECTORS
                )
                index = tl.sum(tl.where(tl.arange(0, LANES) == place, target_index, 0))
                target = il.pointer(memory.buffers + index.to(tl.int64) * buffer_bytes, OUT)
                il.put(target + cells, total, dest, group, mask)


@triton.jit(
    do_not_specialize=["own_buffer", "signals", "call", "elements", "first_local"]
)
def embedding_all_to_all_close(
    ranks, own_buffer, signals, epochs, ctx, call, elements, first_local,
    RANKS: tl.constexpr, OUT: tl.constexpr,
):
    """Tell the node's peers that all vectors for them are stored, and wait for theirs. One program.

    ``own_buffer`` is the address of rank 0's copy of the buffer that this rank's output lies in,
    and ``elements`` the size of that.

    **Protocol.** The launches before this one have stored everything, so the signals release it. If
    a grant has not come in time, the group is broken and nothing is announced.

    **Example.** Two ranks of one node: rank 0 signals rank 1, and ends once rank 1 has signalled.
    """
    REMOTE: tl.constexpr = RANKS.remote
    LOCAL: tl.constexpr = RANKS.world_size - REMOTE
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    if LOCAL > 1:
        LANES: tl.constexpr = next_power_of_2(RANKS.world_size)
        peers, is_peer = _node(ranks, first_local, REMOTE, LOCAL, LANES)
        done = il.in_turn(il.pointer(signals, tl.int32) + DONE, epoch, MAX_RANKS)
        arrived = il.is_broken(group) == 0
        if arrived:
            il.signal(done + rank + tl.zeros_like(peers), stamp, peers, group, is_peer)
            arrived = il.wait(done + peers, stamp, peers, 0, group, is_peer)
        if not arrived:
            output = il.pointer(own_buffer + rank * tl.multiple_of(group[2], 16), OUT)
            il.fill_nan(output, elements.to(tl.int64))
    il.advance_epoch(epochs, epoch)


@triton.jit(
    do_not_specialize=[
        "output", "landing", "call", "samples", "first_rows", "slice_rows", "columns",
    ]
)
def embedding_all_to_all_collect(
    sources, output, landing, epochs, ctx, call, samples, first_rows, slice_rows, columns,
    REMOTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OUT: tl.constexpr,
):
    """Copy what other nodes have sent from the landing to its columns of this rank's output.

    ``sources`` has a row ``[rank, offset in the landing, columns, first column, bytes of its first
    slice, bytes of every other one]`` per rank of another node. The first slice has ``first_rows``
    samples, the others have ``slice_rows``, which are not fewer.

    **Protocol.** All slices have arrived, or the group is broken. Each slice carries the stamp of
    its sender's call behind its rows. A slice of another call is reported and becomes NaN; if the
    group is broken, every slice does.

    **Example.** Two nodes of one rank, four samples, slices of one sample: rank 0 finds b0 and b1
    in its landing, each with a stamp, and copies them to column 1 of its output.
    """
    # The kernel that has pooled was the last call: its epoch is the one before the next.
    stamp = il.mark(il.previous_epoch(il.next_epoch(epochs)), call)
    group = il.join(ctx)
    BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    blocks = (slice_rows + ROWS - 1) // ROWS
    slices = 1 + (tl.maximum(samples - first_rows, 0) + slice_rows - 1) // slice_rows
    broken = il.is_broken(group)
    for task in range(tl.program_id(0), REMOTE * slices * blocks, tl.num_programs(0)):
        source, rest = task % REMOTE, task // REMOTE
        number, block = rest // blocks, rest % blocks
        entry = sources + 6 * source
        width, first_column = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
        is_first, later = number == 0, (number - 1).to(tl.int64)
        begin = tl.where(is_first, 0, first_rows + later * slice_rows)
        rows = tl.minimum(samples - begin, tl.where(is_first, first_rows, slice_rows))
        place = landing + tl.load(entry + 1)
        place += tl.where(is_first, 0, tl.load(entry + 4) + later * tl.load(entry + 5))
        if (width > 0) & (block * ROWS < rows):
            seen = tl.load(_stamp_at(place, rows, width * BYTES), volatile=True)
            if (seen != stamp) & (broken == 0):
                il.report_late(group, tl.load(entry).to(tl.int32), number + 1, stamp, seen)
            is_right = ((seen == stamp) & (broken == 0)).to(tl.int32)
            line = (block * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
            for start in range(0, width, COLUMNS):
                column = (start + tl.arange(0, COLUMNS))[None, :]
                mask = (line < rows) & (column < width)
                arrived = il.pointer(place, OUT) + line * width + column
                value = tl.load(arrived, mask=mask, other=0.0)
                target = il.pointer(output, OUT) + first_column + column
                target += (begin + line) * columns
                tl.store(target, il.nan_unless(is_right, value), mask=mask)
