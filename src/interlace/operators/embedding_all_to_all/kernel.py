"""The kernels of ``embedding_all_to_all``; README.md explains the protocol."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.comm import MAX_PROGRAMS
from interlace.operators.embedding_all_to_all import record

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
_MAX_RANKS = tl.constexpr(record.MAX_RANKS)
_DONE = tl.constexpr(record.DONE)
_COUNTER = tl.constexpr(record.COUNTER)
_HEADER = tl.constexpr(record.HEADER)
_MAX_TABLES = tl.constexpr(record.MAX_TABLES)
# Of a table and owner: pieces of all owners are counted together
_MAX_PIECES = tl.constexpr(MAX_PROGRAMS // _MAX_RANKS.value)


# Forward


@triton.jit
def _vectors(address, dtype: tl.constexpr, ALIGN: tl.constexpr):
    """Integer addresses, of one or several rows, as pointers; ``ALIGN`` elements from there are
    aligned.
    """
    BYTES: tl.constexpr = ALIGN * (dtype.primitive_bitwidth // 8)
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(dtype)), BYTES)


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
    MEAN: tl.constexpr, DTYPE: tl.constexpr, BAGS: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, UNROLL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Sums of the ``count`` bags of ``table`` from sample ``first`` on: float32 ``[BAGS, WIDTH]``,
    rows in index order.

    Row numbers are a step ahead of rows, and the rows of a step are all under way before the first
    is added.
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
def _place(
    tables, table, first, count, columns, BAGS: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, ALIGN: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Offsets of a block's elements in its owner's output (or in ``[samples, own columns]``), and
    their mask.
    """
    entry = tables + table * _FIELDS
    bag, column = tl.arange(0, BAGS), tl.arange(0, WIDTH)
    corner = columns.to(tl.int64) * first + tl.load(entry + (_OWN_COLUMN if OWN else _COLUMN))
    offsets = tl.multiple_of(corner, ALIGN) + bag[:, None] * columns + column[None, :]
    mask = (bag < count)[:, None] & (column >= 0)[None, :]
    if not WHOLE:
        mask = mask & (column < tl.multiple_of(tl.load(entry + _WIDTH), ALIGN))[None, :]
    return offsets, mask


@triton.jit
def _owned(dest, B, chunk):
    """Samples of a rank."""
    return tl.minimum(chunk, tl.maximum(B - dest * chunk, 0))


@triton.jit(do_not_specialize=["buffers", "buffer_bytes", "taken", "grants", "signals", "staging", "call", "B", "chunk", "T", "slots", "column_groups", "own_groups"])
def embedding_all_to_all_forward(
    tables, indices, offsets, weights, tiles, buffers, grants, signals, staging, epochs, ctx,
    table_counts, call, buffer_bytes, taken, slots, B, chunk, T, column_groups, own_groups,
    WORLD_SIZE: tl.constexpr, PROTOCOL: tl.constexpr, ORDER: tl.constexpr, MEAN: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, WHOLE: tl.constexpr, BAGS: tl.constexpr,
    WIDTH: tl.constexpr, UNROLL: tl.constexpr, ALIGN: tl.constexpr, SLICE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Pool this rank's ``T`` tables for every sample of the batch, each result straight into its
    owner's output.

    Protocol: every rank takes a free buffer for its output. Program 0 *grants* it to every source:
    puts the buffer's number into ``grants[me]`` there and signals; so a rank that is not in this
    call yet receives nothing. Programs go round over blocks of ``BAGS`` bags of one table and
    destination, once all grants are here: destinations in turn from the neighbour on, this rank
    being the last (``interleaved``), or those of the peers first, or this rank's own first. Under
    ``direct`` and ``tiles`` the last program to have finished these blocks signals every
    destination. Under ``sliced`` blocks go to ``staging``; the program that completes a slice of
    ``SLICE_BLOCKS`` blocks puts them, fences, and sets the slice's flag. The program of the highest
    index waits, last of all, until all sources are done. A granted buffer is written by nobody
    after that: this rank's stream goes on, and the next grant of the buffer comes when its tensor
    is gone.

    A rank that has its slices may be one call ahead of a rank that has programs without any for it,
    so grants, their numbers and DONE have two sets. A slice's flag has one: it is set again after
    the grant of its reader, whose last call is over then.

    No program waits for one that waits, other than for program 0's grants, which come first of all.

    Example: two ranks with a table of width 1 each, batch 2. Rank 0 pools bags [a0, a1], rank 1
    [b0, b1]. Rank 0 writes a1 to column 0 of rank 1's output, then a0 to column 0 of its own; rank
    1 b0 to column 1 of rank 0's, then b1. Outputs: ``[[a0, b0]]`` and ``[[a1, b1]]``.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    flags = il.pointer(signals, tl.int32)
    granting, done = il.in_turn(flags, epoch, _MAX_RANKS), il.in_turn(flags + _DONE, epoch, _MAX_RANKS)
    numbers = il.in_turn(il.pointer(grants, tl.int32), epoch, _MAX_RANKS)
    blocks = (chunk + BAGS - 1) // BAGS
    # Products, whose divisor the compiler knows.
    columns, own_columns = column_groups * ALIGN, own_groups * ALIGN
    own_address = buffers + taken.to(tl.int64) * buffer_bytes + me * tl.multiple_of(group[2], 16)
    own = il.pointer(own_address, OUT)
    if program == 0:
        il.put(numbers + me + tl.zeros_like(peers), taken + tl.zeros_like(peers), peers, group, others)
        il.signal(granting + me + tl.zeros_like(peers), stamp, peers, group, others)

    if ORDER == "local_first" or WORLD_SIZE == 1:
        _pool_local(
            tables, indices, offsets, weights, own, T * blocks, blocks, me, B, chunk, columns,
            MEAN, DTYPE, OUT, WHOLE, BAGS, WIDTH, UNROLL, ALIGN,
        )  # fmt: skip
    if WORLD_SIZE > 1:
        granted = il.wait(granting + peers, stamp, peers, 0, group, others)
        number = tl.where(peers == me, taken, il.get(numbers + peers, me, group, others, 0))
        DESTS: tl.constexpr = WORLD_SIZE if ORDER == "interleaved" else WORLD_SIZE - 1
        tasks = tl.where(granted, DESTS * T * blocks, 0)
        for task in range(program, tasks, programs):
            dest = (me + 1 + task % DESTS) % WORLD_SIZE
            table, block = task // DESTS // blocks, task // DESTS % blocks
            mine = _owned(dest, B, chunk)
            count = tl.minimum(mine - block * BAGS, BAGS)
            if count > 0:
                total = pooled(
                    tables, indices, offsets, weights, table, dest * chunk + block * BAGS, count, B,
                    MEAN, DTYPE, BAGS, WIDTH, WHOLE, UNROLL, ALIGN,
                ).to(OUT)  # fmt: skip
                place, mask = _place(tables, table, block * BAGS, count, columns, BAGS, WIDTH, WHOLE, ALIGN, False)
                buffer = buffers + tl.sum(tl.where(peers == dest, number, 0)).to(tl.int64) * buffer_bytes
                target = il.pointer(buffer, OUT)
                if PROTOCOL == "sliced":
                    if dest == me:
                        tl.store(own + place, total, mask=mask)
                    else:
                        kept = il.pointer(staging, OUT) + chunk.to(tl.int64) * dest * own_columns
                        stage, mask = _place(tables, table, block * BAGS, count, own_columns, BAGS, WIDTH, WHOLE, ALIGN, True)
                        tl.store(kept + stage, total, mask=mask)
                        first_block = block // SLICE_BLOCKS * SLICE_BLOCKS
                        members = tl.minimum((mine + BAGS - 1) // BAGS - first_block, SLICE_BLOCKS)
                        slot = dest * slots + table * ((blocks + SLICE_BLOCKS - 1) // SLICE_BLOCKS) + block // SLICE_BLOCKS
                        counter = il.peer_pointer(flags + _HEADER + WORLD_SIZE * slots + slot, me, group)
                        if il.arrive_last(counter, block - first_block, members):
                            for each in range(first_block, first_block + members):
                                count = tl.minimum(mine - each * BAGS, BAGS)
                                place, mask = _place(tables, table, each * BAGS, count, columns, BAGS, WIDTH, WHOLE, ALIGN, False)
                                stage, mask = _place(tables, table, each * BAGS, count, own_columns, BAGS, WIDTH, WHOLE, ALIGN, True)
                                il.put(target + place, tl.load(kept + stage, mask=mask, cache_modifier=".cg"), dest, group, mask)
                            il.fence(group)
                            il.signal(flags + _HEADER + (me - dest) * slots + slot, stamp, dest, group, ORDER="relaxed")
                elif PROTOCOL == "tiles":
                    # Whole blocks: what lies beyond the destination's samples is cut off, or is
                    # behind its output.
                    column = tl.load(tables + table * _FIELDS + _COLUMN).to(tl.int32)
                    corner = [dest, tl.sum(tl.where(peers == dest, number, 0)), block * BAGS, column]
                    il.put_tile(tiles, corner, tl.reshape(total, [1, 1, BAGS, WIDTH]))
                else:
                    il.put(target + place, total, dest, group, mask)
        if PROTOCOL != "sliced":
            if PROTOCOL == "tiles":
                il.complete_tiles()
            if granted:
                if il.arrive_last(il.peer_pointer(flags + _COUNTER, me, group), program, programs):
                    il.signal(done + me + tl.zeros_like(peers), stamp, peers, group, others)
    if ORDER == "remote_first" and WORLD_SIZE > 1:
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
                complete = il.wait(done + peers, stamp, peers, 0, group, others)
                arrived = arrived & complete
            if not arrived:
                il.fill_nan(own, _owned(me, B, chunk).to(tl.int64) * columns)
        if PROTOCOL == "sliced":
            il.clear_old(flags + _HEADER, WORLD_SIZE * slots, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit
def _pool_local(
    tables, indices, offsets, weights, own, tasks, blocks, me, B, chunk, columns,
    MEAN: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr, WHOLE: tl.constexpr,
    BAGS: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr, ALIGN: tl.constexpr,
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
            place, mask = _place(tables, table, block * BAGS, count, columns, BAGS, WIDTH, WHOLE, ALIGN, False)
            tl.store(own + place, total.to(OUT), mask=mask)


# Backward


@triton.jit
def _run_of(runs, run, count):
    """Where runs begin; past the last one, its end."""
    return tl.load(runs + tl.minimum(run, count)).to(tl.int64)


@triton.jit
def _gradient_of(
    bag, mask, gradient, landing, entry, B, chunk, me, columns, own_columns,
    OUT: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The pooled vectors' gradients of some bags: where they arrived, or, for this rank's own
    samples, where autograd left them.
    """
    BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    column = tl.arange(0, WIDTH)
    sample = bag % B
    mine = gradient + ((sample - me * chunk).to(tl.int64) * columns + tl.load(entry + _COLUMN)) * BYTES
    sent = landing + (sample.to(tl.int64) * own_columns + tl.load(entry + _OWN_COLUMN)) * BYTES
    pointers = _vectors(tl.where(sample // chunk == me, mine, sent), OUT, ALIGN)[:, None] + column[None, :]
    wanted = mask[:, None] & (column >= 0)[None, :]
    if not WHOLE:
        wanted = wanted & (column[None, :] < tl.multiple_of(tl.load(entry + _WIDTH), ALIGN)[:, None])
    return tl.load(pointers, mask=wanted, other=0.0)


@triton.jit
def _gradients(
    first_bag, gradient, landing, entry, scale, bags, start, length, B, chunk, me, columns,
    own_columns, OUT: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, UNROLL: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Sums of runs of lookups, each of one row: float32 ``[runs, WIDTH]``, in the order of the
    lookups.

    The first lookup's bag is known beforehand: most rows are looked up once, and then nothing else
    must be waited for.
    """
    total = _gradient_of(
        first_bag, length > 0, gradient, landing, entry, B, chunk, me, columns, own_columns, OUT,
        WIDTH, WHOLE, ALIGN
    ).to(tl.float32)  # fmt: skip
    if scale is not None:
        total = total * tl.load(scale + start, mask=length > 0, other=0.0)[:, None]
    for step in range(1, tl.max(length, 0), UNROLL):
        vectors = ()
        for ahead in tl.static_range(UNROLL):
            held = step + ahead < length
            bag = tl.load(bags + start + step + ahead, mask=held, other=0)
            vector = _gradient_of(
                bag, held, gradient, landing, entry, B, chunk, me, columns, own_columns, OUT, WIDTH,
                WHOLE, ALIGN
            )
            vectors = vectors + (vector,)
        for ahead in tl.static_range(UNROLL):
            if scale is None:
                total += vectors[ahead].to(tl.float32)
            else:
                factor = tl.load(scale + start + step + ahead, mask=step + ahead < length, other=0.0)
                total += vectors[ahead].to(tl.float32) * factor[:, None]
    return total


@triton.jit
def _current(
    entry, row, mask, target, UPDATE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr
):  # fmt: skip
    """What an update changes: rows, and Adagrad's state of each. Asked for before the gradients are
    here.
    """
    column = tl.arange(0, WIDTH)
    width = tl.multiple_of(tl.load(entry + _WIDTH), ALIGN)
    stride = tl.multiple_of(tl.load(entry + _TARGET_STRIDE), ALIGN)
    place = tl.load(entry + _TARGET)
    mask = mask & (place >= 0)
    pointers = _vectors(target + place, DTYPE, ALIGN)[:, None] + row[:, None] * stride[:, None] + column[None, :]
    states = tl.load(entry + _STATE).to(tl.pointer_type(tl.float32)) + row
    cells = mask[:, None] & (column[None, :] < width[:, None])
    weight = tl.zeros([row.shape[0], WIDTH], tl.float32)
    state = tl.zeros(row.shape, tl.float32)
    if UPDATE != "store":
        weight = tl.load(pointers, mask=cells, other=0.0).to(tl.float32)
    if UPDATE == "adagrad":
        state = tl.load(states, mask=mask, other=0.0)
    return pointers, states, weight, state


@triton.jit
def _apply(
    entry, current, total, mask, arrived, learning_rate, epsilon,
    UPDATE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Store rows' gradients, or update the rows with them; ``current`` is of the same rows."""
    pointers, states, weight, state = current
    column = tl.arange(0, WIDTH)
    width = tl.multiple_of(tl.load(entry + _WIDTH), ALIGN)
    mask = mask & (tl.load(entry + _TARGET) >= 0)
    if UPDATE == "store":
        value = tl.where((arrived + column * 0)[None, :] > 0, total, float("nan"))
        tl.store(pointers, value.to(DTYPE), mask=mask[:, None] & (column[None, :] < width[:, None]))
    else:
        mask = mask & (arrived + width * 0 > 0)
        cells = mask[:, None] & (column[None, :] < width[:, None])
        if UPDATE == "adagrad":
            new = state + tl.sum(total * total, 1) / width.to(tl.float32)
            tl.store(states, new, mask=mask)
            step = learning_rate / (tl.sqrt_rn(new) + epsilon)
        else:
            step = learning_rate + tl.zeros(width.shape, tl.float32)
        tl.store(pointers, (weight - step[:, None] * total).to(DTYPE), mask=cells)


@triton.jit
def _push(
    gradient, landing, tiles, owners, spans, flags, stamp, group, B, chunk, columns, most_columns,
    tables_most, PUSHERS, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Send every owner this rank's samples' gradients, table by table, and tell when a table's are
    complete.

    A program waits for the arrival of what it sent once for every ``BLOCKS`` blocks of ``ROWS``
    samples.
    """
    program = tl.program_id(0)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    counts = tl.load(owners + peers, mask=peers < WORLD_SIZE, other=0)
    line, column = tl.arange(0, ROWS), tl.arange(0, PIECE)
    mine = _owned(me, B, chunk)
    blocks = (mine + ROWS - 1) // ROWS
    pieces = tl.maximum(tl.minimum((blocks + BLOCKS - 1) // BLOCKS, _MAX_PIECES), 1)
    members = (WORLD_SIZE - 1) * pieces
    for task in range(program, tables_most * members, PUSHERS):
        table, member = task // members, task % members
        owner = (me + 1 + member % (WORLD_SIZE - 1)) % WORLD_SIZE
        if table < tl.load(owners + owner):
            span = spans + 3 * (owner * tables_most + table)
            here, there, width = tl.load(span), tl.load(span + 1), tl.load(span + 2)
            first = (chunk.to(tl.int64) * me) * most_columns + tl.multiple_of(there, ALIGN)
            for block in range(member // (WORLD_SIZE - 1), blocks, pieces):
                row = (line + block * ROWS)[:, None].to(tl.int64)
                held = (row < mine) & (column[None, :] < tl.multiple_of(width, ALIGN))
                source = _vectors(gradient, OUT, ALIGN) + tl.multiple_of(here, ALIGN) + row * columns + column[None, :]
                value = tl.load(source, mask=held, other=0.0, eviction_policy="evict_first")
                if tiles is None:
                    il.put(il.pointer(landing, OUT) + first + row * most_columns + column[None, :], value, owner, group, held)
                else:
                    if (block + 1) * ROWS <= mine:
                        il.put_tile(tiles, [owner, me * chunk + block * ROWS, there.to(tl.int32)], tl.reshape(value, [1, ROWS, PIECE]))
                    else:  # a whole tile would cover the next rank's samples
                        il.put(il.pointer(landing, OUT) + first + row * most_columns + column[None, :], value, owner, group, held)
            if tiles is not None:
                il.complete_tiles()
        if il.arrive_last(il.peer_pointer(flags + _HEADER + table, me, group), member, members):
            # Owners' flags for a table follow the counters of all tables.
            slot = flags + _HEADER + _MAX_TABLES + table * _MAX_RANKS + me
            il.signal(slot + tl.zeros_like(peers), stamp, peers, group, (table < counts) & (peers != me))


@triton.jit
def _await_tables(flags, stamp, group, first, last, WORLD_SIZE: tl.constexpr):
    """Wait for all ranks' gradients of tables ``first`` to ``last``, that one included."""
    me = il.rank(group)
    lane = tl.arange(0, 8 * _MAX_RANKS)
    source = lane % _MAX_RANKS
    arrived = 1
    for start in range(first, last + 1, 8):
        table = start + lane // _MAX_RANKS
        awaited = (table <= last) & (source < WORLD_SIZE) & (source != me)
        complete = il.wait(flags + _HEADER + _MAX_TABLES + start * _MAX_RANKS + lane, stamp, source, start, group, awaited)
        arrived = tl.where(complete, arrived, 0)
    return arrived


@triton.jit(
    do_not_specialize=[
        "gradient", "landing", "landing_here", "target", "signals", "call", "B", "chunk", "T",
        "column_groups", "most_groups", "tables_most", "learning_rate", "epsilon",
    ]
)
def embedding_all_to_all_backward(
    tables, owners, spans, bags, scale, segments, runs, run_bags, run_keys, run_segments, run_count,
    tickets, partials, arrivals, gradient, landing, landing_here, tiles, target, signals, epochs,
    ctx, call, B, chunk, T, column_groups, most_groups, tables_most, learning_rate, epsilon,
    WORLD_SIZE: tl.constexpr, PUSHERS: tl.constexpr, UPDATE: tl.constexpr, BY_SEGMENT: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, WHOLE: tl.constexpr, RUNS: tl.constexpr,
    WIDTH: tl.constexpr, UNROLL: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, PIECE: tl.constexpr, RUN_LOOKUPS: tl.constexpr, TICKET: tl.constexpr,
):  # fmt: skip
    """Send the gradients of this rank's samples to their tables' owners; sum those of this rank's
    tables by row, and apply.

    The host has sorted this rank's lookups by row (a *key* is a row's number among all rows of the
    rank), stably. A *segment* is all lookups of one row; it is cut into *runs* of at most
    ``RUN_LOOKUPS``. Which program takes which runs is left to chance (``tickets``), but a run's sum
    is in the order of its lookups, and a segment's in the order of its runs: the result is the same
    bit by bit. The program that completes a segment of several runs adds their ``partials`` and
    applies the sum.

    Protocol: program 0 grants its landing to every source, with a signal. The first ``PUSHERS``
    programs wait for all grants and put each owner's columns of this rank's gradients, table by
    table, at this rank's samples' rows of the owner's landing ``[B, columns of the rank that has
    most]``; the last one done with a table signals its owners: ``[table][source]``. The other
    programs take runs in the order of tables, and wait for a table's signals from all sources
    before its first run. The program of the highest index waits for all tables, last of all: then
    nobody writes into the landing any more. A rank without tables waits for grants only, and may be
    one call ahead of a late pusher: grants have two sets. A table's signal has one, which is set
    again after the grant of its owner, whose last call is over then.

    No program waits for one of a higher index: pushers for program 0's grants, the others for
    pushers.

    Example: two ranks with a table each, batch 2; gradients ``[[g0, h0]]`` on rank 0 and ``[[g1,
    h1]]`` on rank 1. Rank 0 keeps g0 where it is and puts h0 to row 0 of rank 1's landing; rank 1
    puts g1 to row 1 of rank 0's. If both samples look up row 5 of rank 0's table, its gradient is
    g0 + g1.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    flags = il.pointer(signals, tl.int32)
    columns = column_groups * ALIGN
    if WORLD_SIZE > 1:
        granting = il.in_turn(flags, epoch, _MAX_RANKS)
        if program == 0:
            il.signal(granting + me + tl.zeros_like(peers), stamp, peers, group, others)
        if program < PUSHERS:
            granted = il.wait(granting + peers, stamp, peers, 0, group, others)
            if granted:
                _push(
                    gradient, landing, tiles, owners, spans, flags, stamp, group, B, chunk, columns,
                    most_groups * ALIGN, tables_most, PUSHERS, OUT, WORLD_SIZE, ROWS, BLOCKS, PIECE,
                    ALIGN,
                )  # fmt: skip
    if program >= PUSHERS:
        count = tl.load(run_count).to(tl.int32)
        lane = tl.arange(0, RUNS)
        one = tl.arange(0, 1)
        columns_at = tl.arange(0, WIDTH)
        ready = 0  # tables whose gradients are here
        arrived = 1
        first = tl.atomic_add(tickets, TICKET * RUNS, sem="relaxed", scope="gpu")
        while first < count:
            for tile in range(TICKET):
                # One trip for all that is known of the runs, one for rows, states and gradients.
                run = first + tile * RUNS + lane
                held = run < count
                start = _run_of(runs, run, count)
                length = (_run_of(runs, run + 1, count) - start).to(tl.int32)
                bag = tl.load(run_bags + run, mask=held, other=0)
                segment = tl.load(run_segments + run, mask=held, other=0)
                table = bag // B
                entry = tables + table * _FIELDS
                if BY_SEGMENT:
                    row = segment.to(tl.int64)
                else:
                    row = tl.load(run_keys + run, mask=held, other=0).to(tl.int64) - tl.load(entry + _FIRST_KEY)
                current = _current(entry, row, held, target, UPDATE, DTYPE, WIDTH, ALIGN)
                opening = tl.load(segments + segment, mask=held, other=0).to(tl.int64)
                size = (tl.load(segments + segment + 1, mask=held, other=0) - opening).to(tl.int32)
                if WORLD_SIZE > 1:
                    last = tl.max(table, 0)
                    if last >= ready:
                        arrived = arrived * _await_tables(flags, stamp, group, ready, last, WORLD_SIZE)
                        ready = last + 1
                total = _gradients(
                    bag, gradient, landing_here, entry, scale, bags, start, length, B, chunk, me,
                    columns, most_groups * ALIGN, OUT, WIDTH, WHOLE, UNROLL, ALIGN,
                )  # fmt: skip
                whole = size <= RUN_LOOKUPS
                _apply(entry, current, total, held & whole, arrived, learning_rate, epsilon, UPDATE, DTYPE, WIDTH, ALIGN)
                if tl.max((held & (size > RUN_LOOKUPS)).to(tl.int32), 0) > 0:
                    # Two runs of long segments begin within RUN_LOOKUPS lookups at most: one's
                    # last, another's first.
                    parts = (size + RUN_LOOKUPS - 1) // RUN_LOOKUPS
                    slot = 2 * (start // RUN_LOOKUPS) + (start == opening).to(tl.int64)
                    long = (held & (size > RUN_LOOKUPS))[:, None] & (columns_at >= 0)[None, :]
                    tl.store(partials + slot[:, None] * WIDTH + columns_at[None, :], total, mask=long)
                    tl.debug_barrier()
                    for each in range(RUNS):
                        chosen = held & (size > RUN_LOOKUPS) & (lane == each)
                        if tl.max(chosen.to(tl.int32), 0) > 0:
                            begin = tl.sum(tl.where(chosen, opening, 0), 0)
                            pieces = tl.sum(tl.where(chosen, parts, 0), 0)
                            before = tl.atomic_add(arrivals + 2 * (begin // RUN_LOOKUPS) + 1, 1, sem="acq_rel", scope="gpu")
                            tl.debug_barrier()
                            if before == pieces - 1:
                                place = 2 * (begin // RUN_LOOKUPS) + 1 + one * 0
                                cells = place[:, None] * WIDTH + columns_at[None, :]
                                sum_of_runs = tl.load(partials + cells, cache_modifier=".cg")
                                for piece in range(1, pieces):
                                    place = 2 * ((begin + piece * RUN_LOOKUPS) // RUN_LOOKUPS) + one * 0
                                    cells = place[:, None] * WIDTH + columns_at[None, :]
                                    sum_of_runs += tl.load(partials + cells, cache_modifier=".cg")
                                which = tl.sum(tl.where(chosen, table, 0), 0) + one * 0
                                where = tl.sum(tl.where(chosen, row, 0), 0) + one * 0
                                entry_of_it = tables + which * _FIELDS
                                current_of_it = _current(entry_of_it, where, which >= 0, target, UPDATE, DTYPE, WIDTH, ALIGN)
                                _apply(
                                    entry_of_it, current_of_it, sum_of_runs, which >= 0, arrived,
                                    learning_rate, epsilon, UPDATE, DTYPE, WIDTH, ALIGN,
                                )  # fmt: skip
            first = tl.atomic_add(tickets, TICKET * RUNS, sem="relaxed", scope="gpu")
        if WORLD_SIZE > 1:
            if program == programs - 1:
                _await_tables(flags, stamp, group, 0, T - 1, WORLD_SIZE)
    if WORLD_SIZE > 1:
        il.clear_old(flags + _HEADER + _MAX_TABLES, _MAX_TABLES * _MAX_RANKS, epoch, group)
    il.advance_epoch(epochs, epoch)
