"""Gradients of pooled vectors: their pushes to the owners of the tables, and the waits for them;
then, without communication, the sums of rows' gradients and the updates of rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.comm import MAX_PROGRAMS
from interlace.language.sizes import next_power_of_2
from interlace.operators.embedding_all_to_all.kernels.vectors import (
    COLUMN, HEADER, MAX_RANKS, MAX_TABLES, OWN_COLUMN, STATE, TABLE_WIDTH, TARGET,
    TARGET_STRIDE, samples_of, vectors_at,
)

# A table is cut into pieces for each owner; the pieces of all owners are counted together.
_MAX_PIECES = tl.constexpr(MAX_PROGRAMS // MAX_RANKS.value)


class GradientPushing(NamedTuple):
    """The constants that say how gradients are sent.

    Attributes:
        programs: Programs that send; 0 in a group of one rank.
        rows: Samples of one table that a program sends at a time.
        blocks: Blocks of as many samples that it sends before it waits for their arrival.
        width: The lanes of a vector of the widest table of any rank, a power of two.
    """

    programs: Any
    rows: Any
    blocks: Any
    width: Any


class Gradients(NamedTuple):
    """The places of the gradients of pooled vectors.

    Attributes:
        local: Address of this rank's samples' gradients, ``[samples, columns]``.
        landed: Address of the gradients that peers send, ``[B, landing_columns]``.
        B, chunk: Samples of all ranks, and of one.
        rank: This rank.
        columns: Columns of all ranks' tables.
        landing_columns: Columns of the rank that has most.
    """

    local: Any
    landed: Any
    B: Any
    chunk: Any
    rank: Any
    columns: Any
    landing_columns: Any


@triton.jit
def push_gradients(
    program, gradients, landing, owners, max_tables, flags, stamp, group,
    WORLD_SIZE: tl.constexpr, PUSHING: tl.constexpr, VECTORS: tl.constexpr,
):
    """Send every owner this rank's samples' gradients, table by table; signal complete tables.

    ``owners`` has a row ``[tables, 0, 0]`` per rank, then a row ``[column, column in the owner's
    landing, width]`` per owner and table. A program waits for the arrival of what it sent once for
    every ``blocks`` blocks of ``rows`` samples.
    """
    ROWS: tl.constexpr = PUSHING.rows
    BLOCKS: tl.constexpr = PUSHING.blocks
    WIDTH: tl.constexpr = PUSHING.width
    OUT: tl.constexpr = tl.dtype(VECTORS.out_dtype)
    ALIGN: tl.constexpr = VECTORS.align
    rank, chunk, columns = gradients.rank, gradients.chunk, gradients.columns
    landing_columns = gradients.landing_columns
    peers = tl.arange(0, next_power_of_2(WORLD_SIZE))
    counts = tl.load(owners + 3 * peers, mask=peers < WORLD_SIZE, other=0)
    spans = owners + 3 * WORLD_SIZE
    line, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    samples = samples_of(rank, gradients.B, chunk)
    blocks = (samples + ROWS - 1) // ROWS
    pieces = tl.maximum(tl.minimum((blocks + BLOCKS - 1) // BLOCKS, _MAX_PIECES), 1)
    members = (WORLD_SIZE - 1) * pieces
    for task in range(program, max_tables * members, PUSHING.programs):
        table, member = task // members, task % members
        # The next rank is the first, so that ranks do not all send to the same owner.
        owner = (rank + 1 + member % (WORLD_SIZE - 1)) % WORLD_SIZE
        if table < tl.load(owners + 3 * owner):
            span = spans + 3 * (owner * max_tables + table)
            source_column, target_column = tl.load(span), tl.load(span + 1)
            width = tl.load(span + 2)
            first = (chunk.to(tl.int64) * rank) * landing_columns
            first += tl.multiple_of(target_column, ALIGN)
            for block in range(member // (WORLD_SIZE - 1), blocks, pieces):
                row = (line + block * ROWS)[:, None].to(tl.int64)
                mask = (row < samples) & (column[None, :] < tl.multiple_of(width, ALIGN))
                source = vectors_at(gradients.local, OUT, ALIGN)
                source += tl.multiple_of(source_column, ALIGN)
                source = source + row * columns + column[None, :]
                value = tl.load(source, mask=mask, other=0.0, eviction_policy="evict_first")
                lines = il.pointer(landing, OUT) + first + row * landing_columns
                il.put(lines + column[None, :], value, owner, group, mask)
        # The last program of a table has acquired the stores of the others, and its signals release
        # them: an owner that has seen its signal reads complete gradients.
        if il.arrive_last(il.peer_pointer(flags + HEADER + table, rank, group), member, members):
            # Owners' flags for a table follow the counters of all tables.
            slot = flags + HEADER + MAX_TABLES + table * MAX_RANKS + rank
            has_table = (table < counts) & (peers != rank)
            il.signal(slot + tl.zeros_like(peers), stamp, peers, group, has_table)


@triton.jit
def await_tables(flags, stamp, group, first, last, WORLD_SIZE: tl.constexpr):
    """Wait for all ranks' gradients of the tables from ``first`` to ``last``, both included.

    Returns 1 if they have arrived before the deadline, else 0.
    """
    rank = il.rank(group)
    lane = tl.arange(0, 8 * MAX_RANKS)
    source = lane % MAX_RANKS
    arrived = 1
    # Eight tables at a time, a lane for each source, so that one wait covers many signals.
    for start in range(first, last + 1, 8):
        table = start + lane // MAX_RANKS
        awaited = (table <= last) & (source < WORLD_SIZE) & (source != rank)
        flag = flags + HEADER + MAX_TABLES + start * MAX_RANKS + lane
        complete = il.wait(flag, stamp, source, start, group, awaited)
        arrived = tl.where(complete, arrived, 0)
    return arrived


class Rates(NamedTuple):
    """The numbers of an update: its learning rate and, for Adagrad, its epsilon."""

    learning_rate: Any
    epsilon: Any


@triton.jit
def _gradient_of(bag, mask, entry, gradients, VECTORS: tl.constexpr):
    """Load the pooled vectors' gradients of some bags.

    They are where they landed, or, for this rank's own samples, where autograd left them.
    """
    OUT: tl.constexpr = tl.dtype(VECTORS.out_dtype)
    ALIGN: tl.constexpr = VECTORS.align
    BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    column = tl.arange(0, VECTORS.width)
    rank, chunk = gradients.rank, gradients.chunk
    sample = bag % gradients.B
    local_row = (sample - rank * chunk).to(tl.int64) * gradients.columns
    local = gradients.local + (local_row + tl.load(entry + COLUMN)) * BYTES
    landed_row = sample.to(tl.int64) * gradients.landing_columns
    landed = gradients.landed + (landed_row + tl.load(entry + OWN_COLUMN)) * BYTES
    address = tl.where(sample // chunk == rank, local, landed)
    pointers = vectors_at(address, OUT, ALIGN)[:, None] + column[None, :]
    cells = mask[:, None] & (column >= 0)[None, :]
    if not VECTORS.full:
        width = tl.multiple_of(tl.load(entry + TABLE_WIDTH), ALIGN)
        cells = cells & (column[None, :] < width[:, None])
    return tl.load(pointers, mask=cells, other=0.0)


@triton.jit
def sum_runs(
    first_bag, entry, scale, bags, start, length, gradients, VECTORS: tl.constexpr,
):
    """Sum runs of lookups, each of one row, in their order: float32 ``[runs, width]``.

    The first lookup's bag is known beforehand: most rows are looked up once, and then nothing else
    must be waited for.
    """
    # The first lookup needs no load of its bag, so its gradient is requested at once.
    total = _gradient_of(first_bag, length > 0, entry, gradients, VECTORS).to(tl.float32)
    if scale is not None:
        total = total * tl.load(scale + start, mask=length > 0, other=0.0)[:, None]
    for step in range(1, tl.max(length, 0)):
        inside = step < length
        bag = tl.load(bags + start + step, mask=inside, other=0)
        vector = _gradient_of(bag, inside, entry, gradients, VECTORS)
        if scale is None:
            total += vector.to(tl.float32)
        else:
            factor = tl.load(scale + start + step, mask=inside, other=0.0)
            total += vector.to(tl.float32) * factor[:, None]
    return total


@triton.jit
def load_rows(entry, row, mask, target, UPDATE: tl.constexpr, VECTORS: tl.constexpr):
    """Load what an update changes: rows, and Adagrad's state of each.

    They are asked for before the gradients arrive.
    """
    DTYPE: tl.constexpr = tl.dtype(VECTORS.table_dtype)
    WIDTH: tl.constexpr = VECTORS.width
    ALIGN: tl.constexpr = VECTORS.align
    column = tl.arange(0, WIDTH)
    width = tl.multiple_of(tl.load(entry + TABLE_WIDTH), ALIGN)
    stride = tl.multiple_of(tl.load(entry + TARGET_STRIDE), ALIGN)
    offset = tl.load(entry + TARGET)
    # A negative offset marks a table that is not trained.
    mask = mask & (offset >= 0)
    first = vectors_at(target + offset, DTYPE, ALIGN)[:, None]
    pointers = first + row[:, None] * stride[:, None] + column[None, :]
    states = tl.load(entry + STATE).to(tl.pointer_type(tl.float32)) + row
    cells = mask[:, None] & (column[None, :] < width[:, None])
    weight = tl.zeros([row.shape[0], WIDTH], tl.float32)
    state = tl.zeros(row.shape, tl.float32)
    if UPDATE != "store":
        weight = tl.load(pointers, mask=cells, other=0.0).to(tl.float32)
    if UPDATE == "adagrad":
        state = tl.load(states, mask=mask, other=0.0)
    return pointers, states, weight, state


@triton.jit
def update_rows(
    entry, loaded, total, mask, arrived, rates, UPDATE: tl.constexpr, VECTORS: tl.constexpr
):
    """Store rows' gradients, or update the rows with them; :func:`load_rows` has ``loaded`` them.

    If a peer's gradients have not ``arrived``, gradients are NaN, and rows stay as they are.
    """
    DTYPE: tl.constexpr = tl.dtype(VECTORS.table_dtype)
    ALIGN: tl.constexpr = VECTORS.align
    pointers, states, weight, state = loaded
    column = tl.arange(0, VECTORS.width)
    width = tl.multiple_of(tl.load(entry + TABLE_WIDTH), ALIGN)
    mask = mask & (tl.load(entry + TARGET) >= 0)
    if UPDATE == "store":
        value = tl.where((arrived + column * 0)[None, :] > 0, total, float("nan"))
        tl.store(pointers, value.to(DTYPE), mask=mask[:, None] & (column[None, :] < width[:, None]))
    else:
        mask = mask & (arrived + width * 0 > 0)
        cells = mask[:, None] & (column[None, :] < width[:, None])
        if UPDATE == "adagrad":
            new_state = state + tl.sum(total * total, 1) / width.to(tl.float32)
            tl.store(states, new_state, mask=mask)
            step = rates.learning_rate / (tl.sqrt_rn(new_state) + rates.epsilon)
        else:
            step = rates.learning_rate + tl.zeros(width.shape, tl.float32)
        tl.store(pointers, (weight - step[:, None] * total).to(DTYPE), mask=cells)
