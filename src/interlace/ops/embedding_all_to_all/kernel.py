"""The kernels of ``embedding_all_to_all``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.ops.embedding_all_to_all import record

_FIELDS = tl.constexpr(record.FIELDS)
_ADDRESS = tl.constexpr(record.ADDRESS)
_STRIDE = tl.constexpr(record.STRIDE)
_WIDTH = tl.constexpr(record.WIDTH)
_COLUMN = tl.constexpr(record.COLUMN)
_OWN_COLUMN = tl.constexpr(record.OWN_COLUMN)
_FIRST_KEY = tl.constexpr(record.FIRST_KEY)
_TARGET = tl.constexpr(record.TARGET)
_TARGET_STRIDE = tl.constexpr(record.TARGET_STRIDE)
_STATE = tl.constexpr(record.STATE)
_TARGET_FIRST = tl.constexpr(record.TARGET_FIRST)
_MAX_RANKS = tl.constexpr(record.MAX_RANKS)
_DONE = tl.constexpr(record.DONE)
_COUNTER = tl.constexpr(record.COUNTER)
_HEADER = tl.constexpr(record.HEADER)


# Forward


@triton.jit
def _vectors(address, dtype: tl.constexpr, ALIGN: tl.constexpr):
    """Integer addresses, of one or several rows, as pointers; ``ALIGN`` elements from there are aligned."""
    BYTES: tl.constexpr = ALIGN * (dtype.primitive_bitwidth // 8)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), BYTES)


@triton.jit
def _lookups(indices, start, length, step, UNROLL: tl.constexpr):
    """The next ``UNROLL`` row numbers of each bag; 0 beyond its end."""
    found = ()
    for ahead in tl.static_range(UNROLL):
        found = found + (tl.load(indices + start + step + ahead, mask=step + ahead < length, other=0).to(tl.int64),)
    return found


@triton.jit
def pooled(
    tables, indices, offsets, weights, table, first, count, B,
    MEAN: tl.constexpr, DTYPE: tl.constexpr, BAGS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    UNROLL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Sums of the ``count`` bags of ``table`` from sample ``first`` on: float32 ``[BAGS, WIDTH]``, rows in index order.

    Row numbers are a step ahead of rows, and the rows of a step are all under way before the first is added.
    """
    entry = tables + table * _FIELDS
    stride = tl.multiple_of(tl.load(entry + _STRIDE), ALIGN)
    base = _vectors(tl.load(entry + _ADDRESS), DTYPE, ALIGN)
    bag = tl.arange(0, BAGS)
    columns = tl.arange(0, WIDTH)
    place = offsets + (B.to(tl.int64) * table + first) + bag
    start = tl.load(place, mask=bag < count, other=0).to(tl.int64)
    length = (tl.load(place + 1, mask=bag < count, other=0).to(tl.int64) - start).to(tl.int32)
    longest = tl.max(length, 0)
    total = tl.zeros([BAGS, WIDTH], tl.float32)
    row = _lookups(indices, start, length, 0, UNROLL)
    for step in range(0, longest, UNROLL):
        following = _lookups(indices, start, length, step + UNROLL, UNROLL)
        vectors = ()
        for ahead in tl.static_range(UNROLL):
            pointers = base + row[ahead][:, None] * stride + columns[None, :]
            wanted = (step + ahead < length)[:, None]
            if not WHOLE:
                wanted = wanted & (columns < tl.multiple_of(tl.load(entry + _WIDTH), ALIGN))[None, :]
            vectors = vectors + (tl.load(pointers, mask=wanted, other=0.0),)
        for ahead in tl.static_range(UNROLL):
            if weights is None:
                total += vectors[ahead].to(tl.float32)
            else:
                scale = tl.load(weights + start + step + ahead, mask=step + ahead < length, other=0.0)
                total += vectors[ahead].to(tl.float32) * scale.to(tl.float32)[:, None]
        row = following
    if MEAN:
        total = total / tl.maximum(length, 1).to(tl.float32)[:, None]
    return total


@triton.jit
def _place(tables, table, first, count, columns, BAGS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr):
    """Offsets of a block's elements in its owner's output, and their mask."""
    entry = tables + table * _FIELDS
    bag, column = tl.arange(0, BAGS), tl.arange(0, WIDTH)
    corner = columns.to(tl.int64) * first + tl.load(entry + _COLUMN)
    offsets = tl.multiple_of(corner, ALIGN) + bag[:, None] * columns + column[None, :]
    mask = (bag < count)[:, None] & (column >= 0)[None, :]
    if not WHOLE:
        mask = mask & (column < tl.multiple_of(tl.load(entry + _WIDTH), ALIGN))[None, :]
    return offsets, mask


@triton.jit
def _owned(dest, B, chunk):
    """Samples of a rank."""
    return tl.minimum(chunk, tl.maximum(B - dest * chunk, 0))


@triton.jit
def _fill_nan(address, count, dtype: tl.constexpr):
    target = il.pointer(address, dtype)
    lanes = tl.arange(0, 1024)
    for start in range(0, count, 1024):
        tl.store(target + start + lanes, tl.full([1024], float("nan"), dtype), mask=start + lanes < count)


@triton.jit(do_not_specialize=["buffers", "buffer_bytes", "taken", "grants", "signals", "staging", "call", "B", "chunk", "T", "slots", "column_groups"])
def embedding_all_to_all_forward(
    tables, indices, offsets, weights, buffers, grants, signals, staging, epochs, ctx, table_counts, call, buffer_bytes, taken, slots,
    B, chunk, T, column_groups,
    WORLD_SIZE: tl.constexpr, PROTOCOL: tl.constexpr, LOCAL_FIRST: tl.constexpr, MEAN: tl.constexpr, DTYPE: tl.constexpr,
    OUT: tl.constexpr, WHOLE: tl.constexpr, BAGS: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr, ALIGN: tl.constexpr,
    SLICE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Pool this rank's ``T`` tables for every sample of the batch, each result straight into its owner's output.

    Protocol: every rank takes a free buffer for its output. Program 0 *grants* it to every source: puts the buffer's number
    into ``grants[me]`` there and signals; so a rank that is not in this call yet receives nothing. Programs go round over
    blocks of ``BAGS`` bags of one table and destination: those of the peers, destinations in turn from the neighbour on,
    once all grants are here; then their own (or the other way round). Under ``direct`` and ``tiles`` the last program to
    have finished its remote blocks signals every destination. Under ``sliced`` blocks go to ``staging``; the program that
    completes a slice of ``SLICE_BLOCKS`` blocks puts them, fences, and sets the slice's flag. The program of the highest
    index waits, last of all, until all sources are done. A granted buffer is written by nobody after that: this rank's stream
    goes on, and the next grant of the buffer comes when its tensor is gone.

    No program waits for one that waits, other than for program 0's grants, which come first of all.

    Example: two ranks with a table of width 1 each, batch 2. Rank 0 pools bags [a0, a1], rank 1 [b0, b1]. Rank 0 writes a1 to
    column 0 of rank 1's output, then a0 to column 0 of its own; rank 1 b0 to column 1 of rank 0's, then b1. Outputs:
    ``[[a0, b0]]`` and ``[[a1, b1]]``.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    flags = il.pointer(signals, tl.int32)
    numbers = il.pointer(grants, tl.int32)
    blocks = (chunk + BAGS - 1) // BAGS
    columns = column_groups * ALIGN  # a product that the compiler knows the divisor of
    own_address = buffers + taken.to(tl.int64) * buffer_bytes + me * tl.multiple_of(group[2], 16)
    own = il.pointer(own_address, OUT)
    if program == 0:
        il.put(numbers + me + tl.zeros_like(peers), taken + tl.zeros_like(peers), peers, group, others)
        il.signal(flags + me + tl.zeros_like(peers), stamp, peers, group, others)

    if LOCAL_FIRST:
        _pool_local(
            tables, indices, offsets, weights, own, T * blocks, blocks, me, B, chunk, columns,
            MEAN, DTYPE, OUT, WHOLE, BAGS, WIDTH, UNROLL, ALIGN,
        )  # fmt: skip
    if WORLD_SIZE > 1:
        granted = il.wait(flags + peers, stamp, peers, 0, group, others)
        number = il.get(numbers + peers, me, group, others, 0)
        remote = tl.where(granted, (WORLD_SIZE - 1) * T * blocks, 0)
        for task in range(program, remote, programs):
            dest = (me + 1 + task % (WORLD_SIZE - 1)) % WORLD_SIZE
            table, block = task // (WORLD_SIZE - 1) // blocks, task // (WORLD_SIZE - 1) % blocks
            mine = _owned(dest, B, chunk)
            count = tl.minimum(mine - block * BAGS, BAGS)
            if count > 0:
                total = pooled(
                    tables, indices, offsets, weights, table, dest * chunk + block * BAGS, count, B,
                    MEAN, DTYPE, BAGS, WIDTH, WHOLE, UNROLL, ALIGN,
                ).to(OUT)  # fmt: skip
                place, mask = _place(tables, table, block * BAGS, count, columns, BAGS, WIDTH, WHOLE, ALIGN)
                buffer = buffers + tl.sum(tl.where(peers == dest, number, 0)).to(tl.int64) * buffer_bytes
                target = il.pointer(buffer, OUT)
                if PROTOCOL == "sliced":
                    kept = il.pointer(staging, OUT) + chunk.to(tl.int64) * dest * columns
                    tl.store(kept + place, total, mask=mask)
                    first_block = block // SLICE_BLOCKS * SLICE_BLOCKS
                    members = tl.minimum((mine + BAGS - 1) // BAGS - first_block, SLICE_BLOCKS)
                    slot = dest * slots + table * ((blocks + SLICE_BLOCKS - 1) // SLICE_BLOCKS) + block // SLICE_BLOCKS
                    counter = il.peer_pointer(flags + _HEADER + WORLD_SIZE * slots + slot, me, group)
                    if il.arrive_last(counter, block - first_block, members):
                        for each in range(first_block, first_block + members):
                            count = tl.minimum(mine - each * BAGS, BAGS)
                            place, mask = _place(tables, table, each * BAGS, count, columns, BAGS, WIDTH, WHOLE, ALIGN)
                            il.put(target + place, tl.load(kept + place, mask=mask, cache_modifier=".cg"), dest, group, mask)
                        il.fence(group)
                        il.signal(flags + _HEADER + (me - dest) * slots + slot, stamp, dest, group, ORDER="relaxed")
                else:
                    il.put(target + place, total, dest, group, mask)
        if PROTOCOL != "sliced":
            if granted:
                if il.arrive_last(il.peer_pointer(flags + _COUNTER, me, group), program, programs):
                    il.signal(flags + _DONE + me + tl.zeros_like(peers), stamp, peers, group, others)
    if not LOCAL_FIRST:
        _pool_local(
            tables, indices, offsets, weights, own, T * blocks, blocks, me, B, chunk, columns,
            MEAN, DTYPE, OUT, WHOLE, BAGS, WIDTH, UNROLL, ALIGN,
        )  # fmt: skip
    if WORLD_SIZE > 1:
        if program == programs - 1:
            arrived = granted
            if PROTOCOL == "sliced":
                slices = (blocks + SLICE_BLOCKS - 1) // SLICE_BLOCKS
                mine = (_owned(me, B, chunk) + BAGS * SLICE_BLOCKS - 1) // (BAGS * SLICE_BLOCKS)
                lanes = tl.arange(0, 64)
                for step in range(1, WORLD_SIZE):
                    source = (me + step) % WORLD_SIZE
                    expected = tl.load(table_counts + source) * slices
                    for start in range(0, expected, 64):
                        slot = start + lanes
                        awaited = (slot < expected) & (slot % slices < mine)
                        if tl.sum(awaited.to(tl.int32)) > 0:
                            here = flags + _HEADER + source * slots + slot
                            complete = il.wait(here, stamp, source + lanes * 0, start, group, awaited)
                            arrived = arrived & complete
            else:
                complete = il.wait(flags + _DONE + peers, stamp, peers, 0, group, others)
                arrived = arrived & complete
            if not arrived:
                _fill_nan(own_address, _owned(me, B, chunk).to(tl.int64) * columns, OUT)
    il.advance_epoch(epochs, epoch)


@triton.jit
def _pool_local(
    tables, indices, offsets, weights, own, tasks, blocks, me, B, chunk, columns,
    MEAN: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr, WHOLE: tl.constexpr, BAGS: tl.constexpr, WIDTH: tl.constexpr,
    UNROLL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """This program's share of the blocks whose samples are this rank's own."""
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        table, block = task // blocks, task % blocks
        count = tl.minimum(_owned(me, B, chunk) - block * BAGS, BAGS)
        if count > 0:
            total = pooled(
                tables, indices, offsets, weights, table, me * chunk + block * BAGS, count, B,
                MEAN, DTYPE, BAGS, WIDTH, WHOLE, UNROLL, ALIGN,
            )  # fmt: skip
            place, mask = _place(tables, table, block * BAGS, count, columns, BAGS, WIDTH, WHOLE, ALIGN)
            tl.store(own + place, total.to(OUT), mask=mask)
