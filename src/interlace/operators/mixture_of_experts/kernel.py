"""The kernels of ``mixture_of_experts``; README.md explains the protocol.

``plan`` says how many rows go where (``layout``); every kernel reads it, and only :func:`plan_call`
talks to the peers about it.
"""

import triton
import triton.language as tl

import interlace.language as il
from interlace.operators.mixture_of_experts import layout
from interlace.gemm.kernels.tiles import multiply_tile_of, start_in_turn, tile_place

_ROWS = tl.constexpr(layout.ROWS)
_MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
_DONE = tl.constexpr(layout.DONE)
_FINISHED = tl.constexpr(layout.FINISHED)
_HEADER = tl.constexpr(layout.HEADER)
_COUNTERS = tl.constexpr(layout.HEADER + layout.MAX_EXPERTS * layout.MAX_RANKS)
_ARRIVALS = tl.constexpr(layout.ARRIVALS)
_RETURNS = tl.constexpr(layout.RETURNS)
_TABLES = tl.constexpr(layout.TABLES)


# Which row goes where


@triton.jit
def _expert_of(experts, slot, slots, E):
    """The expert of each slot, and whether it is one."""
    expert = tl.load(experts + slot, mask=slot < slots, other=-1).to(tl.int32)
    return expert, (expert >= 0) & (expert < E)


@triton.jit(do_not_specialize=["slots", "E"])
def count_slots(experts, histograms, slots, E, E_LANES: tl.constexpr, BLOCK: tl.constexpr):
    """How many slots of each block of ``BLOCK`` name each expert: ``histograms [blocks, E_LANES]``.
    """
    block = tl.program_id(0)
    expert, named = _expert_of(experts, block * BLOCK + tl.arange(0, BLOCK), slots, E)
    found = tl.histogram(tl.where(named, expert, 0), E_LANES, mask=named)
    tl.store(histograms + block * E_LANES + tl.arange(0, E_LANES), found)


@triton.jit(do_not_specialize=["call", "half", "taken", "slots", "capacity", "E", "L"])
def plan_call(
    experts, histograms, slot_rows, slot_at, plan, grants, numbers, signals, epochs, ctx, call,
    half, taken, slots, capacity, E, L, WORLD_SIZE: tl.constexpr, R_LANES: tl.constexpr,
    L_LANES: tl.constexpr, E_LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number this rank's rows, and learn from the peers how many rows come from whom.

    A slot's row follows those of the same expert in earlier slots; rows beyond ``capacity`` are
    dropped (row -1). ``slot_rows`` says where each slot's result comes back, ``slot_at`` the
    reverse.

    Protocol: program 0 puts the counts and the number of the buffer that this rank grants into
    ``numbers[half][me]`` of every peer, signals, and waits for all. So a rank that has everyone's
    counts also knows that everyone's memory may be written. ``numbers`` has two halves by the
    epoch's parity: a peer may still be reading those of the last call, never those of the one
    before, whose kernels have ended on all ranks that are in the last one.

    Example: two ranks, experts 0 and 1, one on each; slots of rank 0 name [1, 0, 1], those of rank
    1 [0]. Counts are [1, 2] and [1, 0]. At expert 0 arrive rank 0's row 0 and rank 1's row 1; at
    expert 1 rank 0's rows 0 and 1.
    """
    program, blocks = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, E_LANES)
    before = tl.zeros([E_LANES], tl.int32)
    mine = tl.zeros([E_LANES], tl.int32)
    for first in range(0, blocks, 16):
        block = first + tl.arange(0, 16)[:, None]
        found = tl.load(histograms + block * E_LANES + lanes[None, :], mask=block + lanes[None, :] * 0 < blocks, other=0)
        mine += tl.sum(found, 0)
        before += tl.sum(tl.where(block < program, found, 0), 0)
    mine = tl.minimum(mine, capacity)
    starts = tl.cumsum(mine + _ROWS, 0) - mine

    slot = program * BLOCK + tl.arange(0, BLOCK)
    expert, named = _expert_of(experts, slot, slots, E)
    earlier = (expert[:, None] == expert[None, :]) & (slot[:, None] > slot[None, :])
    same = expert[:, None] == lanes[None, :]
    number = tl.sum(earlier.to(tl.int32), 1) + tl.sum(tl.where(same, before[None, :], 0), 1)
    row = tl.sum(tl.where(same, starts[None, :], 0), 1) + number
    kept = named & (number < capacity)
    tl.store(slot_rows + slot, tl.where(kept, row, -1), mask=slot < slots)
    tl.store(slot_at + row, slot, mask=kept)
    if program == 0:
        _exchange(
            mine, plan, grants, numbers, signals, epochs, ctx, call, half, taken, E, L, WORLD_SIZE,
            R_LANES, L_LANES, E_LANES,
        )  # fmt: skip


@triton.jit
def _exchange(
    mine, plan, grants, numbers, signals, epochs, ctx, call, half, taken, E, L,
    WORLD_SIZE: tl.constexpr, R_LANES: tl.constexpr, L_LANES: tl.constexpr, E_LANES: tl.constexpr,
):  # fmt: skip
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, R_LANES)
    others = (peers < WORLD_SIZE) & (peers != me)
    granting = il.in_turn(il.pointer(signals, tl.int32), epoch, _MAX_RANKS)
    counts = il.pointer(numbers + (epoch & 1).to(tl.int64) * half, tl.int32)
    granted = counts + WORLD_SIZE * E
    lanes = tl.arange(0, E_LANES)
    for step in tl.static_range(WORLD_SIZE):
        il.put(counts + me * E + lanes, mine, (me + 1 + step) % WORLD_SIZE, group, lanes < E)
    il.put(granted + me + peers * 0, taken + peers * 0, peers, group, peers < WORLD_SIZE)
    il.signal(granting + me + peers * 0, stamp, peers, group, others)
    complete = il.wait(granting + peers, stamp, peers, 0, group, others).to(tl.int32)

    rank, local = tl.arange(0, R_LANES)[:, None], tl.arange(0, L_LANES)[None, :]
    expert = rank * L + local
    here = (rank < WORLD_SIZE) & (local < L)
    arrived = tl.zeros([R_LANES, L_LANES], tl.int32)
    for source in tl.static_range(WORLD_SIZE):
        arrived += il.get(counts + source * E + expert, me, group, here, 0) * complete
    tl.store(plan + _TABLES * WORLD_SIZE * E + expert, arrived, mask=here)
    whole = (arrived + _ROWS - 1) // _ROWS * _ROWS
    arrival = tl.cumsum(whole, 1) - whole
    for source in tl.static_range(WORLD_SIZE):
        count = il.get(counts + source * E + expert, me, group, here, 0) * complete
        wide = tl.where(here, count + _ROWS, 0)
        of_ranks = tl.sum(wide, 1)
        back = (tl.cumsum(of_ranks, 0) - of_ranks)[:, None] + tl.cumsum(wide, 1) - count
        tl.store(plan + source * E + expert, count, mask=here)
        tl.store(plan + (_ARRIVALS * WORLD_SIZE + source) * E + expert, arrival, mask=here)
        tl.store(plan + (_RETURNS * WORLD_SIZE + source) * E + expert, back, mask=here)
        arrival += count
    tl.store(grants + peers, il.get(granted + peers, me, group, peers < WORLD_SIZE, 0), mask=peers < WORLD_SIZE)
    tl.store(plan + (_TABLES * WORLD_SIZE + 1) * E, complete)


@triton.jit
def _complete(plan, met, E, WORLD_SIZE: tl.constexpr):
    """1 if every rank is in this call, else 0; in a forward pass, where ``met`` is None, all counts
    are 0 then.
    """
    if met is None:
        return tl.load(plan + (_TABLES * WORLD_SIZE + 1) * E)
    else:
        return tl.load(met)


# Tiles of the products


@triton.jit
def _pick(values, lanes, i):
    return tl.sum(tl.where(lanes == i, values, 0))


@triton.jit
def _local_experts(plan, me, E, L, WORLD_SIZE: tl.constexpr, L_LANES: tl.constexpr):
    """Rows of each of this rank's experts, and where they begin."""
    lanes = tl.arange(0, L_LANES)
    expert = me * L + lanes
    rows = tl.load(plan + _TABLES * WORLD_SIZE * E + expert, mask=lanes < L, other=0)
    begin = tl.load(plan + _ARRIVALS * WORLD_SIZE * E + expert, mask=lanes < L, other=0)
    return rows, begin


@triton.jit
def _tile_of(item, lanes, ends, tiles_m, shifts, tiles_n, GROUP: tl.constexpr):
    """The expert, tile of rows and tile of columns of an item; an expert's rows are gone through
    from its shift on.
    """
    expert = tl.sum((ends <= item).to(tl.int32))
    height = _pick(tiles_m, lanes, expert)
    inside = item - _pick(ends, lanes, expert) + height * tiles_n
    m, n = tile_place(inside, height, tiles_n, GROUP)
    return expert, (m + _pick(shifts, lanes, expert)) % height, n


@triton.jit
def _product(
    x, w, x_tiles, w_tiles, row, end, expert, column, columns, inner,
    TRANSPOSED: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows ``row`` on of ``x [rows, inner]`` times an expert's weight: float32 ``[BM, BN]``,
    columns ``column`` on.

    ``w`` is ``[experts, columns, inner]`` if ``TRANSPOSED`` (as in ``nn.Linear``), else ``[experts,
    inner, columns]``. Rows from ``end`` on, and columns beyond the last, are some numbers.
    """
    return multiply_tile_of(
        expert, x_tiles if TILES else x, w_tiles if TILES else w, row, column, end, columns, inner,
        inner, inner if TRANSPOSED else columns, TILES, TRANSPOSED, PRECISION, BM, BN, BK,
    )  # fmt: skip


@triton.jit
def _store_rows(tiles, target, row, end, column, columns, value, BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr):
    """A tile of ``[rows, columns]``; with ``TILES``, rows from ``end`` to the tile's last are
    overwritten.
    """
    if TILES:
        tiles.store([row, column], value)
    else:
        m, n = (row + tl.arange(0, BM))[:, None], (column + tl.arange(0, BN))[None, :]
        tl.store(target + m.to(tl.int64) * columns + n, value, mask=(m < end) & (n < columns))


# Dispatch and the first product


@triton.jit
def _push(
    x, slot_at, scales, plan, grants, buffers, flags, group, stamp, buffer_bytes, scale_bytes,
    taken, E, L, hidden, WORLD_SIZE: tl.constexpr, TOP_K: tl.constexpr, PUSHERS: tl.constexpr,
    PUSH_ROWS: tl.constexpr, DTYPE: tl.constexpr, MEET: tl.constexpr, SCALED: tl.constexpr,
    E_LANES: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """This program's share of the rows that leave: pieces of one expert each, experts in the order
    in which they are awaited.
    """
    me = il.rank(group)
    lanes = tl.arange(0, E_LANES)
    expert = (me + 1 + lanes) % WORLD_SIZE * L + lanes // WORLD_SIZE
    counts = tl.load(plan + me * E + expert, mask=lanes < E, other=0)
    pieces = (counts + PUSH_ROWS - 1) // PUSH_ROWS
    ends = tl.cumsum(pieces, 0)
    for task in range(tl.program_id(0), tl.sum(pieces), PUSHERS):
        i = tl.sum((ends <= task).to(tl.int32))
        owner, local = (me + 1 + i) % WORLD_SIZE, i // WORLD_SIZE
        expert_here = owner * L + local
        count, members = _pick(counts, lanes, i), _pick(pieces, lanes, i)
        piece = task - _pick(ends, lanes, i) + members
        arrival = tl.load(plan + (_ARRIVALS * WORLD_SIZE + me) * E + expert_here)
        back = tl.load(plan + (_RETURNS * WORLD_SIZE + me) * E + expert_here)
        granted = taken if MEET else tl.load(grants + owner)
        buffer = buffers + granted.to(tl.int64) * buffer_bytes
        target = il.pointer(buffer, DTYPE)
        for first in range(piece * PUSH_ROWS, tl.minimum(count, (piece + 1) * PUSH_ROWS), ROWS):
            row = first + tl.arange(0, ROWS)
            slot = tl.load(slot_at + back + row, mask=row < count, other=0)
            # Products, whose divisor the compiler knows.
            source, place = (slot // TOP_K).to(tl.int64) * hidden, (arrival + row).to(tl.int64) * hidden
            for start in range(0, hidden, COLS):
                column = start + tl.arange(0, COLS)[None, :]
                wanted = (row < count)[:, None] & (column < hidden)
                value = tl.load(x + source[:, None] + column, mask=wanted)
                il.put(target + place[:, None] + column, value, owner, group, wanted)
            if SCALED:
                scale = tl.load(scales + slot, mask=row < count)
                il.put(il.pointer(buffer + scale_bytes, tl.float32) + arrival + row, scale, owner, group, row < count)
        if il.arrive_last(il.peer_pointer(flags + _COUNTERS + expert_here, me, group), piece, members):
            il.signal(flags + _HEADER + local * _MAX_RANKS + me, stamp, owner, group)


@triton.jit(do_not_specialize=["call", "taken", "E", "L", "hidden_groups"])
def dispatch_grouped_gemm(
    x, slot_at, scales, plan, grants, a_tiles, b_tiles, out_tiles, kept_tiles, b, out, kept, ticket,
    met, buffers, signals, epochs, ctx, call, buffer_bytes, scale_bytes, taken, most, E, L, columns,
    hidden_groups, WORLD_SIZE: tl.constexpr, TOP_K: tl.constexpr, PUSHERS: tl.constexpr,
    PUSH_ROWS: tl.constexpr, DTYPE: tl.constexpr, MEET: tl.constexpr, SCALED: tl.constexpr,
    ACTIVATE: tl.constexpr, KEEP: tl.constexpr, TRANSPOSED: tl.constexpr, TILES: tl.constexpr,
    PRECISION: tl.constexpr, R_LANES: tl.constexpr, E_LANES: tl.constexpr, L_LANES: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Send every slot's row of ``x`` to its expert's rank; multiply what arrives by the experts'
    weights.

    Forward, ``b`` is ``[L, 2 F, hidden]`` with gate and up in turn; ``ACTIVATE`` stores
    ``silu(gate) * up``, ``[most, F]``, and ``KEEP`` gate and up as well, ``[2, most, F]``.
    Backward, ``x`` is the output's gradient, ``b`` is ``[L, hidden, F]``, rows are accompanied by
    their slot's weight (``SCALED``), and the product is stored as it is.

    Protocol: the first ``PUSHERS`` programs put rows straight into the granted buffer of their
    expert's rank, in the order (expert, source, slot). Whoever completes an expert's rows of this
    rank signals their owner, ``[local expert][source]``. The other programs take tiles off a ticket
    counter, expert by expert, and wait for the expert's sources before its first one. Pushers wait
    for nobody (with ``MEET``, for the grants, which program 0 sends first of all); the others for
    pushers, which have lower indices. Program 0 notes in ``met`` whether all ranks have granted:
    what follows puts nothing if they have not. An expert's signal has one set: it is set again
    after the grant of its reader, whose last call is over then.

    Example: as in :func:`plan_call`. Rank 0 puts slots 0 and 2 into rows 0 and 1 of rank 1's buffer
    and signals ``[0][0]`` there, then slot 1 into row 0 of its own. Rank 1 puts its slot into row 1
    of rank 0's buffer, and computes expert 1 on rank 0's rows.
    """
    program = tl.program_id(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, R_LANES)
    flags = il.pointer(signals, tl.int32)
    hidden = hidden_groups * ALIGN
    if program < PUSHERS:
        granted = _complete(plan, None, E, WORLD_SIZE) > 0
        if MEET:
            others = (peers < WORLD_SIZE) & (peers != me)
            granting = il.in_turn(flags, epoch, _MAX_RANKS)
            if program == 0:
                il.signal(granting + me + peers * 0, stamp, peers, group, others)
            granted = granted & il.wait(granting + peers, stamp, peers, 0, group, others)
            if program == 0:
                tl.store(met, granted.to(tl.int32))
        if granted:
            _push(
                x, slot_at, scales, plan, grants, buffers, flags, group, stamp, buffer_bytes,
                scale_bytes, taken, E, L, hidden, WORLD_SIZE, TOP_K, PUSHERS, PUSH_ROWS, DTYPE,
                MEET, SCALED, E_LANES, ALIGN, ROWS, COLS,
            )  # fmt: skip
    else:
        lanes = tl.arange(0, L_LANES)
        rows, begin = _local_experts(plan, me, E, L, WORLD_SIZE, L_LANES)
        tiles_m = (rows + BM - 1) // BM
        tiles_n = (columns + BN - 1) // BN
        ends = tl.cumsum(tiles_m * tiles_n, 0)
        items = tl.sum(tiles_m) * tiles_n
        a = il.pointer(buffers + taken.to(tl.int64) * buffer_bytes + me * tl.multiple_of(group[2], 16), DTYPE)
        weight = il.pointer(b, DTYPE)
        target = il.pointer(out, DTYPE)
        # Enough draws for all items even if those programs that start only when the pushers have
        # left draw none.
        programs = tl.num_programs(0) - PUSHERS
        early = tl.where(programs > PUSHERS, programs - PUSHERS, programs)
        draws = (items + early - 1) // early
        item = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
        ready = -1
        poison = 0.0
        for draw in range(draws):
            more = (draw + 1 < draws) & (item < items)
            following = tl.where(more, tl.atomic_add(ticket, 1, mask=more, sem="relaxed", scope="gpu"), items)
            if item < items:
                expert, m, n = _tile_of(item, lanes, ends, tiles_m, rows * 0, tiles_n, GROUP)
                if expert != ready:
                    coming = tl.load(plan + peers * E + me * L + expert, mask=peers < WORLD_SIZE, other=0) > 0
                    arrived = il.wait(
                        flags + _HEADER + expert * _MAX_RANKS + peers, stamp, peers,
                        me * L + expert, group, coming
                    )
                    if TILES:
                        il.accept_tiles()
                    poison = tl.where(arrived, 0.0, float("nan"))
                    ready = expert
                first = _pick(begin, lanes, expert)
                row, end = first + m * BM, first + _pick(rows, lanes, expert)
                total = poison + _product(
                    a, weight, a_tiles, b_tiles, row, end, expert, n * BN, columns, hidden,
                    TRANSPOSED, TILES, PRECISION, BM, BN, BK,
                )  # fmt: skip
                if ACTIVATE:
                    gate, up = tl.split(tl.reshape(total, [BM, BN // 2, 2]))
                    active = gate / (1 + tl.exp(-gate)) * up
                    width = columns // 2
                    if KEEP:
                        both = il.pointer(kept, DTYPE)
                        _store_rows(kept_tiles, both, row, end, n * (BN // 2), width, gate.to(DTYPE), BM, BN // 2, TILES)
                        _store_rows(kept_tiles, both, most + row, most + end, n * (BN // 2), width, up.to(DTYPE), BM, BN // 2, TILES)
                    _store_rows(out_tiles, target, row, end, n * (BN // 2), width, active.to(DTYPE), BM, BN // 2, TILES)
                else:
                    _store_rows(out_tiles, target, row, end, n * BN, columns, total.to(DTYPE), BM, BN, TILES)
            item = following


# The second product and combine


@triton.jit(do_not_specialize=["call", "E", "L", "spread_ns"])
def grouped_gemm_combine(
    plan, met, a_tiles, b_tiles, put_tiles, a, b, results, signals, epochs, ctx, call, E, L, inner,
    columns, spread_ns, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILES: tl.constexpr, PRECISION: tl.constexpr, R_LANES: tl.constexpr, L_LANES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows of this rank's experts, ``a [arrivals, inner]``, times their weights, each tile straight
    to the ranks that sent its rows.

    Protocol: programs go round over tiles, expert by expert, an expert's rows from those of the
    next rank on, so that ranks do not crowd one destination and own rows come last. A tile goes to
    ``results`` of every source that has rows in it. As a tensor descriptor's tile it goes there
    whole: what lies before and behind the source's rows falls into the spare rows between experts.
    The last program to have finished signals every source. Nobody waits: rows have been granted
    with the counts; backward, by the meeting of :func:`dispatch_grouped_gemm`. If a rank was
    missing there (``met``), nothing is put.

    Example: as in :func:`plan_call`. Rank 0 computes rows 0 and 1 of expert 0, keeps the first and
    puts the second to rank 1; rank 1 puts rows 0 and 1 of expert 1 to rank 0, which then has all
    three results.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    lanes = tl.arange(0, L_LANES)
    complete = _complete(plan, met, E, WORLD_SIZE)
    rows, begin = _local_experts(plan, me, E, L, WORLD_SIZE, L_LANES)
    rows = rows * complete
    next_begin = tl.load(
        plan + (_ARRIVALS * WORLD_SIZE + (me + 1) % WORLD_SIZE) * E + me * L + lanes,
        mask=lanes < L, other=0
    )
    tiles_m = (rows + BM - 1) // BM
    tiles_n = (columns + BN - 1) // BN
    ends = tl.cumsum(tiles_m * tiles_n, 0)
    left, weight, target = il.pointer(a, DTYPE), il.pointer(b, DTYPE), il.pointer(results, DTYPE)
    if spread_ns > 0:
        start_in_turn(spread_ns)
    for item in range(program, tl.sum(tiles_m) * tiles_n, programs):
        expert, m, n = _tile_of(item, lanes, ends, tiles_m, (next_begin - begin) // BM, tiles_n, GROUP)
        first = _pick(begin, lanes, expert)
        end = first + _pick(rows, lanes, expert)
        row = first + m * BM
        # Asked for before the product: they are here when it is done.
        table = plan + me * L + expert
        counts, starts, backs = (), (), ()
        for source in tl.static_range(WORLD_SIZE):
            counts = counts + (tl.load(table + source * E),)
            starts = starts + (tl.load(table + (_ARRIVALS * WORLD_SIZE + source) * E),)
            backs = backs + (tl.load(table + (_RETURNS * WORLD_SIZE + source) * E),)
        total = _product(
            left, weight, a_tiles, b_tiles, row, end, expert, n * BN, columns, inner, TRANSPOSED,
            TILES, PRECISION, BM, BN, BK,
        )  # fmt: skip
        if TILES:
            value = tl.reshape(total.to(DTYPE), [1, BM, BN])
            for source in tl.static_range(WORLD_SIZE):
                start = starts[source]
                if (counts[source] > 0) & (start < row + BM) & (start + counts[source] > row):
                    il.put_tile(put_tiles, [source, backs[source] + row - start, n * BN], value)
        else:
            here = row + tl.arange(0, BM)
            peer = tl.zeros([BM], tl.int32)
            place = tl.zeros([BM], tl.int32)
            for source in tl.static_range(WORLD_SIZE):
                mine = (here >= starts[source]) & (here < starts[source] + counts[source])
                peer = tl.where(mine, source, peer)
                place = tl.where(mine, here - starts[source] + backs[source], place)
            n_here = n * BN + tl.arange(0, BN)[None, :]
            pointers = target + place.to(tl.int64)[:, None] * columns + n_here
            il.put(pointers, total.to(DTYPE), peer[:, None], group, (here < end)[:, None] & (n_here < columns))
    if TILES:
        il.complete_tiles()
    if complete > 0:
        if il.arrive_last(il.peer_pointer(il.pointer(signals, tl.int32) + _FINISHED, me, group), program, programs):
            peers = tl.arange(0, R_LANES)
            others = (peers < WORLD_SIZE) & (peers != me)
            done = il.in_turn(il.pointer(signals, tl.int32) + _DONE, epoch, _MAX_RANKS)
            il.signal(done + me + peers * 0, stamp, peers, group, others)


@triton.jit(do_not_specialize=["call", "tokens", "E", "hidden_groups"])
def sum_results(
    slot_rows, weights, plan, y, gradient, results, gradients, signals, epochs, ctx, call, tokens,
    E, hidden_groups, WORLD_SIZE: tl.constexpr, TOP_K: tl.constexpr, DTYPE: tl.constexpr,
    R_LANES: tl.constexpr, K_LANES: tl.constexpr, ALIGN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Wait for every rank's results; ``y[token]`` is the sum over its slots, in their order, of
    ``weight * row``: float32.

    Without ``weights`` (backward) rows are added as they are; ``gradients``, the slots' own numbers
    that came with the rows, are put in the slots' order. A dropped slot counts as zero.
    """
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    peers = tl.arange(0, R_LANES)
    others = (peers < WORLD_SIZE) & (peers != me)
    flags = il.pointer(signals, tl.int32)
    arrived = il.wait(il.in_turn(flags + _DONE, epoch, _MAX_RANKS) + peers, stamp, peers, 0, group, others)
    poison = tl.where(arrived & (_complete(plan, None, E, WORLD_SIZE) > 0), 0.0, float("nan"))
    source = il.pointer(results, DTYPE)
    hidden = hidden_groups * ALIGN
    slots = tl.arange(0, K_LANES)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        for start in range(0, hidden, COLS):
            column = start + tl.arange(0, COLS)
            total = tl.zeros([COLS], tl.float32) + poison
            for j in tl.static_range(TOP_K):
                row = tl.load(slot_rows + token * TOP_K + j)
                # A mask with the row in it would split vectors.
                place = source + tl.maximum(row, 0).to(tl.int64) * hidden + column
                value = tl.where(row >= 0, il.get(place, me, group, column < hidden, 0.0).to(tl.float32), 0.0)
                if weights is not None:
                    value *= tl.load(weights + token * TOP_K + j)
                total += value
            tl.store(y + hidden.to(tl.int64) * token + column, total.to(DTYPE), mask=column < hidden)
        if gradient is not None:
            row = tl.load(slot_rows + token * TOP_K + slots, mask=slots < TOP_K, other=-1)
            number = il.get(il.pointer(gradients, tl.float32) + row, me, group, row >= 0, 0.0) + poison
            tl.store(gradient + token * TOP_K + slots, number, mask=slots < TOP_K)
    il.clear_old(flags + _HEADER, _COUNTERS - _HEADER, epoch, group)
    il.advance_epoch(epochs, epoch)


# Backward


@triton.jit(do_not_specialize=["E", "L"])
def swiglu_backward(
    plan, met, kept, product_gradient, inner_gradient, scaled, received, gradients, ctx,
    scale_bytes, most, E, L, width, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr,
    L_LANES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Of each row: gradients of gate and up, in turn; its activation times its slot's weight; the
    weight's gradient, to its source.

    With ``p = grad_y @ w_out`` (``product_gradient``), slot weight s, ``a = silu(gate) * up``: the
    gradient of a is ``s p``, that of s is ``p . a``, and that of w_out is ``grad_y.T @ (s a)``. The
    last of these products are other kernels'. If a rank was missing when all should have met
    (``met``), nothing is put.
    """
    group = il.join(ctx)
    me = il.rank(group)
    lanes = tl.arange(0, L_LANES)
    complete = _complete(plan, met, E, WORLD_SIZE)
    rows, begin = _local_experts(plan, me, E, L, WORLD_SIZE, L_LANES)
    blocks = (rows + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    scales = il.pointer(received + scale_bytes, tl.float32)
    gates, products = il.pointer(kept, DTYPE), il.pointer(product_gradient, DTYPE)
    inner, weighted = il.pointer(inner_gradient, DTYPE), il.pointer(scaled, DTYPE)
    for item in range(tl.program_id(0), tl.sum(blocks), tl.num_programs(0)):
        expert = tl.sum((ends <= item).to(tl.int32))
        first = _pick(begin, lanes, expert)
        end = first + _pick(rows, lanes, expert)
        row = first + (item - _pick(ends, lanes, expert) + _pick(blocks, lanes, expert)) * ROWS + tl.arange(0, ROWS)
        scale = tl.load(scales + row, mask=row < end, other=0.0)
        number = tl.zeros([ROWS], tl.float32)
        for start in range(0, width, COLS):
            column = start + tl.arange(0, COLS)[None, :]
            place = row.to(tl.int64)[:, None] * width + column
            wanted = (row < end)[:, None] & (column < width)
            gate = tl.load(gates + place, mask=wanted, other=0.0).to(tl.float32)
            up = tl.load(gates + most.to(tl.int64) * width + place, mask=wanted, other=0.0).to(tl.float32)
            incoming = tl.load(products + place, mask=wanted, other=0.0).to(tl.float32)
            sigmoid = 1 / (1 + tl.exp(-gate))
            silu = gate * sigmoid
            number += tl.sum(incoming * silu * up, 1)
            # Rows that did not come left NaN in the product; what is multiplied with the rows
            # themselves must be NaN as well.
            active = tl.where(incoming == incoming, silu * up * scale[:, None], incoming)
            incoming *= scale[:, None]
            both = tl.join(incoming * up * sigmoid * (1 + gate * (1 - sigmoid)), incoming * silu)
            wide = 2 * start + tl.arange(0, 2 * COLS)[None, :]
            both_places = row.to(tl.int64)[:, None] * 2 * width + wide
            tl.store(inner + both_places, tl.reshape(both, [ROWS, 2 * COLS]).to(DTYPE), mask=(row < end)[:, None] & (wide < 2 * width))
            tl.store(weighted + place, active.to(DTYPE), mask=wanted)
        table = plan + me * L + expert
        peer = tl.zeros([ROWS], tl.int32)
        back = tl.zeros([ROWS], tl.int32)
        for source in tl.static_range(WORLD_SIZE):
            start_row = tl.load(table + (_ARRIVALS * WORLD_SIZE + source) * E)
            mine = (row >= start_row) & (row < start_row + tl.load(table + source * E))
            peer = tl.where(mine, source, peer)
            back = tl.where(mine, row - start_row + tl.load(table + (_RETURNS * WORLD_SIZE + source) * E), back)
        il.put(il.pointer(gradients, tl.float32) + back, number, peer, group, (row < end) & (complete + row * 0 > 0))


@triton.jit(do_not_specialize=["E", "L", "me"])
def grouped_gemm_gradient(
    plan, a_tiles, b_tiles, out_tiles, a, b, out, me, E, L, wide, narrow,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, L_LANES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Each expert's ``a.T @ b`` over its rows: ``a [rows, wide]``, ``b [rows, narrow]`` -> ``out
    [L, wide, narrow]``; zero without rows.

    ``EVEN``: no tile of ``out`` runs into the next expert's.
    """
    lanes = tl.arange(0, L_LANES)
    rows, begin = _local_experts(plan, me, E, L, WORLD_SIZE, L_LANES)
    tiles_m, tiles_n = (wide + BM - 1) // BM, (narrow + BN - 1) // BN
    left, right, target = il.pointer(a, DTYPE), il.pointer(b, DTYPE), il.pointer(out, DTYPE)
    for item in range(tl.program_id(0), L * tiles_m * tiles_n, tl.num_programs(0)):
        expert, inside = item // (tiles_m * tiles_n), item % (tiles_m * tiles_n)
        m, n = tile_place(inside, tiles_m, tiles_n, GROUP)
        first, count = _pick(begin, lanes, expert), _pick(rows, lanes, expert)
        total = tl.zeros([BM, BN], tl.float32)
        across, along = m * BM, n * BN
        if TILES:
            whole = count // BK * BK
            for k in range(0, whole, BK):
                total = tl.dot(a_tiles.load([first + k, across]).T, b_tiles.load([first + k, along]), total)
            if whole < count:
                # What follows an expert's rows is some numbers, perhaps NaN.
                inner = (whole + tl.arange(0, BK))[:, None] < count
                x = tl.where(inner, a_tiles.load([first + whole, across]), 0.0)
                z = tl.where(inner, b_tiles.load([first + whole, along]), 0.0)
                total = tl.dot(x.T, z, total)
        else:
            wide_here, narrow_here = across + tl.arange(0, BM)[None, :], along + tl.arange(0, BN)[None, :]
            for k in range(0, count, BK):
                row = (k + tl.arange(0, BK))[:, None]
                place = (first + row).to(tl.int64)
                x = tl.load(left + place * wide + wide_here, mask=(row < count) & (wide_here < wide), other=0.0)
                z = tl.load(right + place * narrow + narrow_here, mask=(row < count) & (narrow_here < narrow), other=0.0)
                if PRECISION == "upcast":
                    x, z = x.to(tl.float32), z.to(tl.float32)
                total = tl.dot(x.T, z, total, input_precision="ieee")
        row = expert * wide + across
        _store_rows(out_tiles, target, row, (expert + 1) * wide, along, narrow, total.to(DTYPE), BM, BN, EVEN)
