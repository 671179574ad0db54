"""Combine: results go back to the ranks that sent the rows, and are summed there."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.tiles import Scales, add_bias, start_in_turn
from interlace.language.sizes import next_power_of_2
from interlace.operators.mixture_of_experts.kernels.plan import (
    ARRIVALS, COUNTERS, DONE, FINISHED, HEADER, MAX_RANKS, ArrivalPlan, completeness, local_experts,
    pick, sources_of, way_back,
)
from interlace.operators.mixture_of_experts.kernels.tiles import as_operand, multiply, tile_of


@triton.jit(do_not_specialize=["call", "E", "L", "spread_ns"])
def grouped_gemm_combine(
    plan, met, a, b, a_scale, b_scale, bias, results, signals, epochs, ctx, call, E, L, inner,
    columns, spread_ns, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, TILING: tl.constexpr,
    L_LANES: tl.constexpr,
):
    """Multiply rows of this rank's experts by their weights, and send the results back.

    The rows ``a`` are ``[arrivals, inner]``, the weights ``b`` ``[L, columns, inner]``, of which
    ``TILING.w_along_k`` says how they lie in memory; ``bias [L, columns]``, unless it is None, is
    added. With ``TILING.block_scales`` both are float8, and their scales ``a_scale [arrivals, inner
    / 128]`` and ``b_scale [L, columns / 128, inner / 128]``. Results go to the ranks that sent the
    rows.

    **Protocol.** Programs go round over tiles, expert by expert, an expert's rows from those of the
    next rank on, so that ranks do not crowd one destination and own rows come last. A tile goes to
    ``results`` of every source that has rows in it. A tensor descriptor stores the whole tile
    there: the rows before and after the source's rows fall into the spare rows between experts. The
    last program to have finished signals every source. No program waits: rows have been granted
    with the counts; backward, by :func:`dispatch_grouped_gemm_backward`. If a rank was
    missing there (``met``), nothing is put. Results are written again in the next call, when their
    reader, which has granted again, has read them.

    **Example.** The two ranks of :func:`plan_call`. Rank 0 computes rows 0 and 1 of expert 0, keeps
    the first and puts the second to rank 1; rank 1 puts rows 0 and 1 of expert 1 to rank 0, which
    then has all three results.
    """
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    DESCRIPTORS: tl.constexpr = TILING.descriptors
    GROUP: tl.constexpr = TILING.group_m
    pid, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    lanes = tl.arange(0, L_LANES)
    arrival_plan = ArrivalPlan(plan, E, L)
    complete = completeness(plan, met, E, WORLD_SIZE)
    rows, begin = local_experts(arrival_plan, rank, WORLD_SIZE, L_LANES)
    # If a rank is missing, its memory was not granted. Without rows nothing is multiplied or put.
    rows = rows * complete
    # The rows of the next rank are the first to be computed.
    next_begin = tl.load(
        plan + (ARRIVALS * WORLD_SIZE + (rank + 1) % WORLD_SIZE) * E + rank * L + lanes,
        mask=lanes < L, other=0
    )
    tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
    tiles_n = (columns + BLOCK_N - 1) // BLOCK_N
    ends = tl.cumsum(tiles_m * tiles_n, 0)
    OPERAND: tl.constexpr = DTYPE if TILING.block_scales == "" else tl.float8e4nv
    left, weight = as_operand(a, OPERAND, DESCRIPTORS), as_operand(b, OPERAND, DESCRIPTORS)
    scales = Scales(a_scale, b_scale, None, None)
    target = as_operand(results, DTYPE, DESCRIPTORS)
    if spread_ns > 0:
        start_in_turn(spread_ns)
    for item in range(pid, tl.sum(tiles_m) * tiles_n, programs):
        shifts = (next_begin - begin) // BLOCK_M
        expert, m, n = tile_of(item, lanes, ends, tiles_m, shifts, tiles_n, GROUP)
        first = pick(begin, lanes, expert)
        end = first + pick(rows, lanes, expert)
        row = first + m * BLOCK_M
        # The destinations are loaded before the product, so that they arrive during it.
        counts, starts, backs = sources_of(arrival_plan, rank, expert, WORLD_SIZE)
        il.record("tile", item, group)
        acc = multiply(
            left, weight, row, end, expert, n * BLOCK_N, columns, inner, TILING, scales
        )
        if bias is not None:
            acc = add_bias(acc, bias + expert * columns, n * BLOCK_N, columns)
        il.record("computed", item, group)
        if DESCRIPTORS:
            value = tl.reshape(acc.to(DTYPE), [1, BLOCK_M, BLOCK_N])
            for source in tl.static_range(WORLD_SIZE):
                start = starts[source]
                if (counts[source] > 0) & (start < row + BLOCK_M) & (start + counts[source] > row):
                    corner = [source, backs[source] + row - start, n * BLOCK_N]
                    il.put_tile(target, corner, value, group)
        else:
            tile_rows = row + tl.arange(0, BLOCK_M)
            peer, result_row = way_back(tile_rows, counts, starts, backs, WORLD_SIZE)
            column = n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            pointers = target + result_row.to(tl.int64)[:, None] * columns + column
            mask = (tile_rows < end)[:, None] & (column < columns)
            il.put(pointers, acc.to(DTYPE), peer[:, None], group, mask)
    # Tiles are stored asynchronously; they must be complete before anyone is told.
    if DESCRIPTORS:
        il.complete_tiles()
    if complete > 0:
        # The last program has acquired the puts of all, and its signals release them.
        finished = il.peer_pointer(il.pointer(signals, tl.int32) + FINISHED, rank, group)
        if il.arrive_last(finished, pid, programs):
            peers, is_peer = il.other_ranks(rank, WORLD_SIZE)
            done = il.in_turn(il.pointer(signals, tl.int32) + DONE, epoch, MAX_RANKS)
            il.signal(done + rank + peers * 0, stamp, peers, group, is_peer)


@triton.jit(do_not_specialize=["call", "tokens", "E", "hidden_groups"])
def sum_results(
    slot_rows, weights, plan, y, gradient, results, gradients, signals, epochs, ctx, call, tokens,
    E, hidden_groups, WORLD_SIZE: tl.constexpr, TOP_K: tl.constexpr, DTYPE: tl.constexpr,
    ALIGN: tl.constexpr, COLS: tl.constexpr,
):
    """Wait for every rank's results; sum those of each token's slots into ``y[token]``.

    The sum of ``weight * row`` is float32 and in the order of the slots. Without ``weights``
    (backward) rows are added as they are; ``gradients``, the slots' own numbers that came with the
    rows, are put in the slots' order. A dropped slot counts as zero.

    **Protocol.** Every program waits for the signals of :func:`grouped_gemm_combine` from all
    peers; they take turns by the epoch's parity. The kernel is the last of the call, so it advances
    the epoch. If a rank is missing, y is NaN.

    **Example.** The two ranks of :func:`plan_call`. Rank 0 has the results of slots 0 and 2 from
    rank 1 and that of slot 1 from itself; with one slot per token, y is each result times the
    slot's weight.
    """
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    peers, is_peer = il.other_ranks(rank, WORLD_SIZE)
    flags = il.pointer(signals, tl.int32)
    done = il.in_turn(flags + DONE, epoch, MAX_RANKS)
    arrived = il.wait(done + peers, stamp, peers, 0, group, is_peer)
    complete = completeness(plan, None, E, WORLD_SIZE) > 0
    poison = tl.where(arrived & complete, 0.0, float("nan"))
    source = il.pointer(results, DTYPE)
    hidden = hidden_groups * ALIGN
    slots = tl.arange(0, next_power_of_2(TOP_K))
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        for start in range(0, hidden, COLS):
            column = start + tl.arange(0, COLS)
            acc = tl.zeros([COLS], tl.float32) + poison
            for j in tl.static_range(TOP_K):
                row = tl.load(slot_rows + token * TOP_K + j)
                # A mask with the row in it would split vectors.
                pointers = source + tl.maximum(row, 0).to(tl.int64) * hidden + column
                is_kept = row >= 0
                value = il.get(pointers, rank, group, column < hidden, 0.0).to(tl.float32)
                value = tl.where(is_kept, value, 0.0)
                if weights is not None:
                    # A dropped slot's weight may be NaN, which 0 would not hide.
                    value *= tl.load(weights + token * TOP_K + j, mask=is_kept, other=0.0)
                acc += value
            pointers = y + hidden.to(tl.int64) * token + column
            tl.store(pointers, acc.to(DTYPE), mask=column < hidden)
        if gradient is not None:
            row = tl.load(slot_rows + token * TOP_K + slots, mask=slots < TOP_K, other=-1)
            numbers = il.pointer(gradients, tl.float32) + row
            number = il.get(numbers, rank, group, row >= 0, 0.0) + poison
            tl.store(gradient + token * TOP_K + slots, number, mask=slots < TOP_K)
    # Signals of long ago would look like new ones when epochs' numbers come again.
    il.clear_old(flags + HEADER, COUNTERS - HEADER, epoch, group)
    il.advance_epoch(epochs, epoch)
