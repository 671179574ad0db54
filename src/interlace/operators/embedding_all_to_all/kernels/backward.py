"""The backward kernel: gradients go to the owners of the tables, which sum and apply them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.operators.embedding_all_to_all import layout
from interlace.operators.embedding_all_to_all.kernels.gradients import (
    Gradients, await_tables, load_rows, push_gradients, sum_runs, update_rows,
)
from interlace.operators.embedding_all_to_all.kernels.vectors import (
    FIELDS, FIRST_KEY, HEADER, MAX_RANKS, MAX_TABLES,
)

_ARRIVALS = tl.constexpr(layout.ARRIVALS)
_TICKET = tl.constexpr(layout.TICKET)


class Runs(NamedTuple):
    """The constants that say how runs of lookups are cut and shared out.

    Attributes:
        block: Runs that a program adds at a time.
        lookups: Lookups of one row that are a run, at most.
    """

    block: Any
    lookups: Any


class Tables(NamedTuple):
    """The records of this rank's tables, and the numbers that pushers read about every owner."""

    records: Any
    owners: Any


class SortedRuns(NamedTuple):
    """The runs of this rank's lookups in the order of their rows.

    Attributes:
        openings: The first lookup of each segment; beyond the last, the number of lookups.
        starts: The first lookup of each run; beyond the last, the number of lookups.
        bags: The bag of each run's first lookup.
        keys: The key of each run's row.
        segments: The segment that each run is of.
        count: The number of runs.
    """

    openings: Any
    starts: Any
    bags: Any
    keys: Any
    segments: Any
    count: Any


class Progress(NamedTuple):
    """The memory by which programs share out the runs.

    Attributes:
        tickets: The number of the next run to be drawn, and the numbers of runs of long segments
            that are summed.
        partials: The sums of runs of long segments, float32.
    """

    tickets: Any
    partials: Any


class Writing(NamedTuple):
    """The constants that say what the kernel writes.

    Attributes:
        update: ``"store"`` (gradients), ``"sgd"`` or ``"adagrad"``.
        by_segment: Whether gradients are stored by the number of the distinct row instead of the
            row's own.
    """

    update: Any
    by_segment: Any


@triton.jit
def _run_start(starts, run, count):
    """Load the first lookups of runs; past the last run, its end."""
    return tl.load(starts + tl.minimum(run, count)).to(tl.int64)


@triton.jit
def _sum_partials(partials, begin, pieces, RUNS: tl.constexpr, VECTORS: tl.constexpr):
    """Add up the partial sums of a segment's runs in their order: float32 ``[1, width]``."""
    LOOKUPS: tl.constexpr = RUNS.lookups
    WIDTH: tl.constexpr = VECTORS.width
    columns = tl.arange(0, WIDTH)
    row = tl.arange(0, 1)
    slot = 2 * (begin // LOOKUPS) + 1 + row * 0
    # From the L2: other programs' stores are not in this one's L1.
    cells = slot[:, None] * WIDTH + columns[None, :]
    total = tl.load(partials + cells, cache_modifier=".cg")
    for piece in range(1, pieces):
        slot = 2 * ((begin + piece * LOOKUPS) // LOOKUPS) + row * 0
        cells = slot[:, None] * WIDTH + columns[None, :]
        total += tl.load(partials + cells, cache_modifier=".cg")
    return total


class _Drawn(NamedTuple):
    """The runs that a program has drawn, one in each lane, and the segments that they are of.

    Attributes:
        start: Number of the run's first lookup, int64.
        opening: Number of the segment's first lookup, int64.
        size: Lookups of the segment.
        table: The segment's table.
        row: The segment's row of the table, int64.
    """

    start: Any
    opening: Any
    size: Any
    table: Any
    row: Any


@triton.jit
def _finish_segments(
    drawn, valid, total, tables, target, progress, arrived, rates, RUNS: tl.constexpr,
    UPDATE: tl.constexpr, VECTORS: tl.constexpr,
):
    """Keep the sums of runs whose segments have several, and update the rows of those segments of
    which all runs are there now.
    """
    LOOKUPS: tl.constexpr = RUNS.lookups
    WIDTH: tl.constexpr = VECTORS.width
    lane, columns = tl.arange(0, RUNS.block), tl.arange(0, WIDTH)
    single = tl.arange(0, 1)
    # At most two runs of long segments begin within as many lookups as a run has: the last of one
    # segment and the first of another.
    parts = (drawn.size + LOOKUPS - 1) // LOOKUPS
    slot = 2 * (drawn.start // LOOKUPS) + (drawn.start == drawn.opening).to(tl.int64)
    is_long = valid & (drawn.size > LOOKUPS)
    mask = is_long[:, None] & (columns >= 0)[None, :]
    cells = slot[:, None] * WIDTH + columns[None, :]
    tl.store(progress.partials + cells, total, mask=mask)
    # All threads have stored before any of them counts the run.
    tl.debug_barrier()
    for position in range(RUNS.block):
        chosen = is_long & (lane == position)
        if tl.max(chosen.to(tl.int32), 0) > 0:
            begin = tl.sum(tl.where(chosen, drawn.opening, 0), 0)
            pieces = tl.sum(tl.where(chosen, parts, 0), 0)
            # Releases this run's partial sum, and acquires those of the others.
            counter = progress.tickets + _ARRIVALS + 2 * (begin // LOOKUPS) + 1
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if before == pieces - 1:
                segment_sum = _sum_partials(progress.partials, begin, pieces, RUNS, VECTORS)
                table = tl.sum(tl.where(chosen, drawn.table, 0), 0) + single * 0
                row = tl.sum(tl.where(chosen, drawn.row, 0), 0) + single * 0
                entry = tables + table * FIELDS
                is_row = table >= 0
                loaded = load_rows(entry, row, is_row, target, UPDATE, VECTORS)
                update_rows(
                    entry, loaded, segment_sum, is_row, arrived, rates, UPDATE, VECTORS
                )


@triton.jit(
    do_not_specialize=[
        "gradient", "landing", "target", "signals", "call", "B", "chunk", "column_groups",
        "landing_groups", "max_tables",
    ]
)
def embedding_all_to_all_backward(
    tables, bags, scale, runs, progress, gradient, landing, target, signals, epochs, ctx,
    call, B, chunk, column_groups, landing_groups, max_tables, rates, WORLD_SIZE: tl.constexpr,
    PUSHING: tl.constexpr, RUNS: tl.constexpr, WRITING: tl.constexpr, VECTORS: tl.constexpr,
):
    """Send the gradients of this rank's samples to the owners of their tables, which apply them.

    Each owner sums the gradients of its tables by row, and stores or applies the sums. The host has
    sorted this rank's lookups by row (a *key* is a row's number among all rows of the rank),
    stably. A *segment* is all lookups of one row; it is cut into *runs* of at most
    ``RUNS.lookups``. Which program draws which runs is left to chance (``progress``), but a run's
    sum is in the order of its lookups, and a segment's in the order of its runs: the result is the
    same bit by bit. The program that completes a segment of several runs adds their sums and
    applies the result. A launch without peers may be of some tables only: ``progress.tickets``
    begins with the number of their first run then, and ``runs.count`` is that of the run behind
    their last.

    **Protocol.**

    1. Program 0 grants this rank's landing to every source, with a signal.
    2. The first ``PUSHING.programs`` programs wait for all grants and put each owner's columns of
       this rank's gradients, table by table, at this rank's samples' rows of the owner's landing
       ``[B, columns of the rank that has most]``; the last one done with a table signals its
       owners: ``[table][source]``.
    3. The other programs draw runs in the order of tables, and wait for a table's signals from all
       sources before its first run.
    4. The program of the highest index waits for all tables, last of all: nobody writes into the
       landing after that.

    A rank without tables waits for grants only, and may be one call ahead of a late pusher: grants
    have two sets. A table's signal has one, which is set again after the grant of its owner, whose
    last call is over then.

    No program waits for one of a higher index: pushers wait for program 0's grants, the others for
    pushers.

    **Example.** Two ranks with a table each, batch 2; gradients ``[[g0, h0]]`` on rank 0 and
    ``[[g1, h1]]`` on rank 1. Rank 0 keeps g0 where it is and puts h0 to row 0 of rank 1's landing;
    rank 1 puts g1 to row 1 of rank 0's. If both samples look up row 5 of rank 0's table, its
    gradient is g0 + g1.
    """
    UPDATE: tl.constexpr = WRITING.update
    LOOKUPS: tl.constexpr = RUNS.lookups
    DRAWN: tl.constexpr = _TICKET * RUNS.block
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    peers, is_peer = il.other_ranks(rank, WORLD_SIZE)
    flags = il.pointer(signals, tl.int32)
    # The columns are products with ALIGN, whose divisor the compiler knows.
    landed = landing + rank * tl.multiple_of(group[2], 16)
    gradients = Gradients(
        gradient, landed, B, chunk, rank, column_groups * VECTORS.align,
        landing_groups * VECTORS.align,
    )
    if WORLD_SIZE > 1:
        # Two sets of grants take turns, as a peer may be one call ahead or behind.
        granting = il.in_turn(flags, epoch, MAX_RANKS)
        # Step 1. This rank's last call is over, so its landing may be written again.
        if program == 0:
            il.signal(granting + rank + tl.zeros_like(peers), stamp, peers, group, is_peer)
        # Step 2. Without every grant nothing is sent: the owners' landings may still be in use.
        if program < PUSHING.programs:
            granted = il.wait(granting + peers, stamp, peers, 0, group, is_peer)
            if granted:
                push_gradients(
                    program, gradients, landing, tables.owners, max_tables, flags, stamp, group, WORLD_SIZE,
                    PUSHING, VECTORS,
                )
    if program >= PUSHING.programs:
        count = tl.load(runs.count).to(tl.int32)
        lane = tl.arange(0, RUNS.block)
        ready = 0  # tables whose gradients have arrived
        arrived = 1
        first = tl.atomic_add(progress.tickets, DRAWN, sem="relaxed", scope="gpu")
        while first < count:
            for tile in range(_TICKET):
                # One trip to memory brings all that is known of the runs, another one the rows,
                # states and gradients.
                run = first + tile * RUNS.block + lane
                valid = run < count
                start = _run_start(runs.starts, run, count)
                length = (_run_start(runs.starts, run + 1, count) - start).to(tl.int32)
                bag = tl.load(runs.bags + run, mask=valid, other=0)
                segment = tl.load(runs.segments + run, mask=valid, other=0)
                table = bag // B
                entry = tables.records + table * FIELDS
                if WRITING.by_segment:
                    row = segment.to(tl.int64)
                else:
                    key = tl.load(runs.keys + run, mask=valid, other=0).to(tl.int64)
                    row = key - tl.load(entry + FIRST_KEY)
                loaded = load_rows(entry, row, valid, target, UPDATE, VECTORS)
                opening = tl.load(runs.openings + segment, mask=valid, other=0).to(tl.int64)
                closing = tl.load(runs.openings + segment + 1, mask=valid, other=0)
                size = (closing - opening).to(tl.int32)
                # Step 3. Runs are in the order of tables, so each table is waited for once.
                if WORLD_SIZE > 1:
                    last = tl.max(table, 0)
                    if last >= ready:
                        arrived = arrived * await_tables(
                            flags, stamp, group, ready, last, WORLD_SIZE
                        )
                        ready = last + 1
                total = sum_runs(bag, entry, scale, bags, start, length, gradients, VECTORS)
                is_short = size <= LOOKUPS
                update_rows(
                    entry, loaded, total, valid & is_short, arrived, rates, UPDATE, VECTORS
                )
                if tl.max((valid & (size > LOOKUPS)).to(tl.int32), 0) > 0:
                    drawn = _Drawn(start, opening, size, table, row)
                    _finish_segments(
                        drawn, valid, total, tables.records, target, progress, arrived, rates, RUNS,
                        UPDATE, VECTORS,
                    )
            first = tl.atomic_add(progress.tickets, DRAWN, sem="relaxed", scope="gpu")
        # Step 4. Tables without lookups are waited for too: their gradients still arrive.
        if WORLD_SIZE > 1:
            if program == programs - 1:
                own_tables = tl.load(tables.owners + 3 * rank).to(tl.int32)
                await_tables(flags, stamp, group, 0, own_tables - 1, WORLD_SIZE)
    if WORLD_SIZE > 1:
        il.clear_old(flags + HEADER + MAX_TABLES, MAX_TABLES * MAX_RANKS, epoch, group)
    il.advance_epoch(epochs, epoch)
