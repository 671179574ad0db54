"""The plan of a call: how many rows go from which rank to which expert, and who agrees on it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.language.sizes import next_power_of_2
from interlace.operators.mixture_of_experts import layout

ROWS = tl.constexpr(layout.ROWS)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
DONE = tl.constexpr(layout.DONE)
FINISHED = tl.constexpr(layout.FINISHED)
HEADER = tl.constexpr(layout.HEADER)
COUNTERS = tl.constexpr(layout.HEADER + layout.MAX_EXPERTS * layout.MAX_RANKS)
ARRIVALS = tl.constexpr(layout.ARRIVALS)
RETURNS = tl.constexpr(layout.RETURNS)
TABLES = tl.constexpr(layout.TABLES)
FEW_BLOCKS = tl.constexpr(layout.FEW_BLOCKS)


class ArrivalPlan(NamedTuple):
    """The plan (``layout``) in this rank's memory, with E experts of all ranks, L of each."""

    table: Any
    E: Any
    L: Any


class ExpertLanes(NamedTuple):
    """The constants that say how many ranks and experts there are.

    Attributes:
        world_size: Number of ranks.
        experts: A power of two that is at least the number of experts of all ranks.
        local: A power of two that is at least the number of experts of a rank.
    """

    world_size: Any
    experts: Any
    local: Any


@triton.jit
def expert_of(experts, slot, slots, E):
    """Load the expert that each slot names, -1 if there is none, and whether there is one."""
    expert = tl.load(experts + slot, mask=slot < slots, other=-1)
    # Compared before it is cut to 32 bits, of which a number of 64 may have those of an expert.
    named = (expert >= 0) & (expert < E)
    return tl.where(named, expert, -1).to(tl.int32), named


@triton.jit(do_not_specialize=["slots", "E"])
def count_slots(experts, histograms, slots, E, E_LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Count the slots of each block of ``BLOCK`` that name each expert.

    The counts go to ``histograms [blocks, E_LANES]``.

    **Protocol.** No peer takes part; :func:`plan_call` follows on the same stream.

    **Example.** Two ranks; slots of rank 0 name experts [1, 0, 1], those of rank 1 [0]. The counts
    are [1, 2] on rank 0 and [1, 0] on rank 1.
    """
    block = tl.program_id(0)
    expert, named = expert_of(experts, block * BLOCK + tl.arange(0, BLOCK), slots, E)
    counts = tl.histogram(tl.where(named, expert, 0), E_LANES, mask=named)
    tl.store(histograms + block * E_LANES + tl.arange(0, E_LANES), counts)


@triton.jit(do_not_specialize=["blocks"])
def number_blocks(histograms, blocks, E_LANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Replace each block's counts by the sums of those before it, and store the sums of all blocks
    behind them.

    ``histograms`` is ``[blocks + 1, E_LANES]``; ``BLOCKS`` is a power of two that is more than
    blocks. A program has an expert.

    **Protocol.** No peer takes part; :func:`plan_call` follows on the same stream.

    **Example.** Two blocks have counts [1, 2] and [1, 0]. They become [0, 0] and [1, 2], and [2, 2]
    follows.
    """
    block = tl.arange(0, BLOCKS)
    column = histograms + block * E_LANES + tl.program_id(0)
    counts = tl.load(column, mask=block < blocks, other=0)
    tl.store(column, tl.cumsum(counts, 0) - counts, mask=block <= blocks)


@triton.jit(do_not_specialize=["call", "half", "buffer_index", "slots", "capacity", "E", "L"])
def plan_call(
    experts, histograms, slot_rows, slot_at, plan, grants, numbers, signals, epochs, ctx, call,
    half, buffer_index, slots, capacity, E, L, LANES: tl.constexpr, BLOCK: tl.constexpr,
    NUMBERED: tl.constexpr,
):
    """Number this rank's rows, and learn from the peers how many rows come from which rank.

    A slot's row follows those of the same expert in earlier slots; rows beyond ``capacity`` are
    dropped (row -1). With ``NUMBERED``, :func:`number_blocks` has gone through ``histograms``; else
    there are at most ``FEW_BLOCKS`` of them. ``slot_rows`` says to which row each slot's result
    comes back, ``slot_at`` the reverse.

    **Protocol.** Program 0 puts the counts and the index of the buffer that this rank grants into
    ``numbers[half][rank]`` of every peer, signals, and waits for all. So a rank that has everyone's
    counts also knows that everyone's memory may be written. ``numbers`` has two halves by the
    epoch's parity: a peer may still be reading those of the last call, never those of the call
    before, whose kernels have ended on all ranks that are in the last one.

    **Example.** Two ranks, experts 0 and 1, one on each; slots of rank 0 name [1, 0, 1], those of
    rank 1 [0]. Counts are [1, 2] and [1, 0]. At expert 0 arrive rank 0's row 0 and rank 1's row 1;
    at expert 1 rank 0's rows 0 and 1.
    """
    E_LANES: tl.constexpr = LANES.experts
    pid, blocks = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, E_LANES)
    # Rows per expert: in the blocks before this program's, and in all of them.
    if NUMBERED:
        before = tl.load(histograms + pid * E_LANES + lanes)
        counts = tl.load(histograms + blocks * E_LANES + lanes)
    else:
        block = tl.arange(0, FEW_BLOCKS)[:, None]
        histogram = tl.load(
            histograms + block * E_LANES + lanes[None, :],
            mask=block + lanes[None, :] * 0 < blocks, other=0,
        )
        counts = tl.sum(histogram, 0)
        before = tl.sum(tl.where(block < pid, histogram, 0), 0)
    counts = tl.minimum(counts, capacity)
    # Results come back with spare rows between experts, so that tiles may run past either end.
    starts = tl.cumsum(counts + ROWS, 0) - counts

    slot = pid * BLOCK + tl.arange(0, BLOCK)
    expert, named = expert_of(experts, slot, slots, E)
    earlier = (expert[:, None] == expert[None, :]) & (slot[:, None] > slot[None, :])
    is_expert = expert[:, None] == lanes[None, :]
    number = tl.sum(earlier.to(tl.int32), 1) + tl.sum(tl.where(is_expert, before[None, :], 0), 1)
    row = tl.sum(tl.where(is_expert, starts[None, :], 0), 1) + number
    kept = named & (number < capacity)
    tl.store(slot_rows + slot, tl.where(kept, row, -1), mask=slot < slots)
    tl.store(slot_at + row, slot, mask=kept)
    if pid == 0:
        _exchange(
            counts, ArrivalPlan(plan, E, L), grants, numbers, signals, epochs, ctx, call, half,
            buffer_index, LANES,
        )


@triton.jit
def _exchange(
    own_counts, plan, grants, numbers, signals, epochs, ctx, call, half, buffer_index,
    LANES: tl.constexpr,
):
    """Tell all peers this rank's counts, wait for theirs, and write the plan and the grants.

    ``numbers`` is the address of two halves: counts ``[rank, E]``, then indices of buffers
    ``[rank]``.
    """
    WORLD_SIZE: tl.constexpr = LANES.world_size
    L_LANES: tl.constexpr = LANES.local
    R_LANES: tl.constexpr = next_power_of_2(WORLD_SIZE)
    E, L = plan.E, plan.L
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    peers = tl.arange(0, R_LANES)
    is_peer = (peers < WORLD_SIZE) & (peers != rank)
    granting = il.in_turn(il.pointer(signals, tl.int32), epoch, MAX_RANKS)
    # The halves take turns, so that a peer may still read the numbers of the last call.
    counts = il.pointer(numbers + (epoch & 1).to(tl.int64) * half, tl.int32)
    granted = counts + WORLD_SIZE * E
    lanes = tl.arange(0, LANES.experts)
    for step in tl.static_range(WORLD_SIZE):
        target = counts + rank * E + lanes
        peer = (rank + 1 + step) % WORLD_SIZE
        il.put(target, own_counts, peer, group, lanes < E)
    il.put(granted + rank + peers * 0, buffer_index + peers * 0, peers, group, peers < WORLD_SIZE)
    # The signal releases the puts: a peer that has seen it reads the numbers of this call.
    il.signal(granting + rank + peers * 0, stamp, peers, group, is_peer)
    # If a rank is missing, all counts become 0, and no kernel of this call sends anything.
    complete = il.wait(granting + peers, stamp, peers, 0, group, is_peer).to(tl.int32)

    owner, local = tl.arange(0, R_LANES)[:, None], tl.arange(0, L_LANES)[None, :]
    expert = owner * L + local
    is_expert = (owner < WORLD_SIZE) & (local < L)
    arrived = tl.zeros([R_LANES, L_LANES], tl.int32)
    for source in tl.static_range(WORLD_SIZE):
        arrived += il.get(counts + source * E + expert, rank, group, is_expert, 0) * complete
    tl.store(plan.table + TABLES * WORLD_SIZE * E + expert, arrived, mask=is_expert)
    padded = (arrived + ROWS - 1) // ROWS * ROWS
    arrival = tl.cumsum(padded, 1) - padded
    for source in tl.static_range(WORLD_SIZE):
        count = il.get(counts + source * E + expert, rank, group, is_expert, 0) * complete
        spaced = tl.where(is_expert, count + ROWS, 0)
        of_ranks = tl.sum(spaced, 1)
        back = (tl.cumsum(of_ranks, 0) - of_ranks)[:, None] + tl.cumsum(spaced, 1) - count
        tl.store(plan.table + source * E + expert, count, mask=is_expert)
        arrival_table = plan.table + (ARRIVALS * WORLD_SIZE + source) * E
        tl.store(arrival_table + expert, arrival, mask=is_expert)
        return_table = plan.table + (RETURNS * WORLD_SIZE + source) * E
        tl.store(return_table + expert, back, mask=is_expert)
        arrival += count
    target = grants + peers
    indices = il.get(granted + peers, rank, group, peers < WORLD_SIZE, 0)
    tl.store(target, indices, mask=peers < WORLD_SIZE)
    tl.store(plan.table + (TABLES * WORLD_SIZE + 1) * E, complete)


@triton.jit
def completeness(table, met, E, WORLD_SIZE: tl.constexpr):
    """Return 1 if every rank is in this call, else 0.

    In a forward pass, where ``met`` is None, all counts are 0 then.
    """
    if met is None:
        return tl.load(table + (TABLES * WORLD_SIZE + 1) * E)
    else:
        return tl.load(met)


@triton.jit
def pick(values, lanes, i):
    """Return element ``i`` of ``values``, whose indices are ``lanes``."""
    return tl.sum(tl.where(lanes == i, values, 0))


@triton.jit
def local_experts(plan, rank, WORLD_SIZE: tl.constexpr, L_LANES: tl.constexpr):
    """Load how many rows each of this rank's experts has, and at which row they begin."""
    lanes = tl.arange(0, L_LANES)
    expert = rank * plan.L + lanes
    mask = lanes < plan.L
    rows = tl.load(plan.table + TABLES * WORLD_SIZE * plan.E + expert, mask=mask, other=0)
    begin = tl.load(plan.table + ARRIVALS * WORLD_SIZE * plan.E + expert, mask=mask, other=0)
    return rows, begin


@triton.jit
def sources_of(plan, rank, expert, WORLD_SIZE: tl.constexpr):
    """Load how many rows of one of this rank's experts come from each source, the first of them in
    the buffer, and the first of them among the source's results: a tuple each.
    """
    table = plan.table + rank * plan.L + expert
    counts, starts, backs = (), (), ()
    for source in tl.static_range(WORLD_SIZE):
        counts = counts + (tl.load(table + source * plan.E),)
        starts = starts + (tl.load(table + (ARRIVALS * WORLD_SIZE + source) * plan.E),)
        backs = backs + (tl.load(table + (RETURNS * WORLD_SIZE + source) * plan.E),)
    return counts, starts, backs


@triton.jit
def way_back(rows, counts, starts, backs, WORLD_SIZE: tl.constexpr):
    """Return the source of each of an expert's rows, and its row among the source's results.

    ``counts``, ``starts`` and ``backs`` are those of :func:`sources_of`.
    """
    peer = tl.zeros_like(rows)
    result_row = tl.zeros_like(rows)
    for source in tl.static_range(WORLD_SIZE):
        start = starts[source]
        from_source = (rows >= start) & (rows < start + counts[source])
        peer = tl.where(from_source, source, peer)
        result_row = tl.where(from_source, rows - start + backs[source], result_row)
    return peer, result_row
