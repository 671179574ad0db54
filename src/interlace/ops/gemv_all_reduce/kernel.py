"""The kernels of ``gemv_all_reduce``; README.md explains the protocols."""

import triton
import triton.language as tl

import interlace.language as il


@triton.jit
def _load_weight(pointers, k, K, MASKED: tl.constexpr):
    # Each weight is used once: let it leave the caches first.
    if MASKED:
        return tl.load(pointers[:, None] + k[None, :], mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(pointers[:, None] + k[None, :], eviction_policy="evict_first")


@triton.jit
def _accumulate(accumulator, x, w, k, K, B: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """One step along K. One token: multiply and keep products apart; several: the matrix unit."""
    weight = _load_weight(w, k, K, MASKED)
    if B == 1:
        value = tl.load(x + k, mask=k < K, other=0.0) if MASKED else tl.load(x + k)
        return accumulator + weight.to(tl.float32) * value.to(tl.float32)[None, :]
    else:
        pointers = x[None, :] + k[:, None]
        value = tl.load(pointers, mask=k[:, None] < K, other=0.0) if MASKED else tl.load(pointers)
        if PRECISION == "upcast":  # the interpreter cannot multiply bfloat16
            return tl.dot(weight.to(tl.float32), value.to(tl.float32), accumulator, input_precision="ieee")
        else:
            return tl.dot(weight, value, accumulator, input_precision=PRECISION)


@triton.jit
def partial_product(
    x, w, rows, tokens, N, B, K, stride_x, stride_w,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """This rank's part of one tile: ``sum over k of w[rows, k] * x[tokens, k]``, float32 ``[BLOCK_N, BLOCK_B]``.

    Rows and tokens outside the matrix repeat the last one; whoever stores the tile masks them.
    """
    w = w + tl.minimum(rows, N - 1).to(tl.int64) * stride_w
    k = tl.arange(0, BLOCK_K)
    whole = K if EVEN_K else K // BLOCK_K * BLOCK_K
    if BLOCK_B == 1:
        x = x + tl.minimum(tl.sum(tokens), B - 1) * stride_x
        accumulator = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    else:
        x = x + tl.minimum(tokens, B - 1) * stride_x
        accumulator = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for start in range(0, whole, BLOCK_K):
        accumulator = _accumulate(accumulator, x, w, start + k, K, BLOCK_B, PRECISION, False)
    if not EVEN_K:
        accumulator = _accumulate(accumulator, x, w, whole + k, K, BLOCK_B, PRECISION, True)
    if BLOCK_B == 1:
        return tl.sum(accumulator, 1)[:, None]
    else:
        return accumulator


@triton.jit
def _tile(tile, N, B, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, EVEN: tl.constexpr):
    """Rows, tokens, their place in a slot, and the mask of a tile; tiles of the same rows follow one another, so that
    weights stay in the L2. Slots have room for whole tiles: then the compiler knows how words are aligned."""
    token_tiles = (B + BLOCK_B - 1) // BLOCK_B
    rows = tile // token_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tile % token_tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    place = rows[:, None].to(tl.int64) * (token_tiles * BLOCK_B) + tokens[None, :]
    if EVEN:
        mask = tl.full([BLOCK_N, BLOCK_B], 1, tl.int1)
    else:
        mask = (rows[:, None] < N) & (tokens[None, :] < B)
    return rows, tokens, place, mask


@triton.jit
def _store_output(y, bias, total, rows, tokens, mask, N):
    if bias is not None:
        total += tl.load(bias + tl.minimum(rows, N - 1)).to(tl.float32)[:, None]
    tl.store(y + tokens[None, :].to(tl.int64) * N + rows[:, None], total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["words", "call", "half", "slot", "tiles"])
def gemv_all_reduce_one_shot(
    x, w, bias, y, words, epochs, ctx, call, half, slot, N, B, K, tiles, stride_x, stride_w,
    WORLD_SIZE: tl.constexpr, ONE_TILE: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``y = sum over ranks of x @ w.T, + bias``: every rank sends its part of every output to every peer.

    Protocol: a program computes its tiles' partial sums and puts them as packed (value, epoch) words into slot
    ``[epoch % 2][rank]`` of every peer; then it waits, word by word, for the same tiles of the other ranks and adds
    them in rank order. A half is written again two calls later: by then its reader has sent the words of the call
    in between, which it did after reading.

    Example: two ranks, N = 2, partial sums ``[1, 2]`` on rank 0 and ``[10, 20]`` on rank 1. Rank 0's slot 1 receives
    ``(10, e) (20, e)``, rank 1's slot 0 ``(1, e) (2, e)``; both compute ``[11, 22]``.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    slot = tl.multiple_of(slot.to(tl.int64), 16)
    slots = il.pointer(words, tl.int64) + tl.multiple_of((epoch & 1).to(tl.int64) * half, 16)
    if ONE_TILE:
        # One tile a program: the own part stays in registers.
        rows, tokens, place, mask = _tile(program, N, B, BLOCK_N, BLOCK_B, EVEN)
        part = partial_product(
            x, w, rows, tokens, N, B, K, stride_x, stride_w, BLOCK_N, BLOCK_K, BLOCK_B, EVEN_K, PRECISION
        )
        for step in tl.static_range(1, WORLD_SIZE):
            il.put_packed(slots + me * slot + place, part, stamp, (me + step) % WORLD_SIZE, group, mask)
        total = il.sum_packed(slots + place, part, slot, stamp, program, group, mask, WORLD_SIZE)
        _store_output(y, bias, total, rows, tokens, mask, N)
    else:
        # Several tiles a program: all are sent before the first is waited for.
        for tile in range(program, tiles, programs):
            rows, tokens, place, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
            part = partial_product(
                x, w, rows, tokens, N, B, K, stride_x, stride_w, BLOCK_N, BLOCK_K, BLOCK_B, EVEN_K, PRECISION
            )
            for step in tl.static_range(1, WORLD_SIZE + 1):
                il.put_packed(slots + me * slot + place, part, stamp, (me + step) % WORLD_SIZE, group, mask)
        for tile in range(program, tiles, programs):
            rows, tokens, place, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
            total = il.sum_packed(slots + place, None, slot, stamp, tile, group, mask, WORLD_SIZE)
            _store_output(y, bias, total, rows, tokens, mask, N)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["data", "signals", "call", "half", "results_offset", "tiles"])
def gemv_all_reduce_two_phase(
    x, w, bias, y, data, signals, epochs, ctx, call, half, results_offset, N, B, K, tiles, stride_x, stride_w,
    WORLD_SIZE: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
    OWNED: tl.constexpr, BLOCK_OWNED: tl.constexpr,
):  # fmt: skip
    """The same sum, each rank reducing and broadcasting ``OWNED`` rows of every tile.

    Protocol: a program stores each row of its partial tiles at the row's owner (one store, whose peer is a tile) and
    signals all peers; when all peers' signals are here, it adds the rows it owns in rank order, stores the results at
    every peer and signals again; when those signals are here, its whole tiles are. The slice is a program's tiles, so a
    signal's wait for the links comes once a phase. Signals are ``[program][phase][source]``: one writer each, whatever
    the grid and the shape. Halves alternate as in the one-shot kernel.

    Example: two ranks, BLOCK_N = 2: rank 0 owns row 0 and rank 1 row 1 of every tile. With parts ``[1, 2]`` and
    ``[10, 20]``, rank 1 sends 10 to rank 0, which adds 1 and sends 11 back; rank 0 sends 2 and gets 22.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = il.next_epoch(epochs)
    stamp = il.mark(epoch, call)
    group = il.join(ctx)
    me = il.rank(group)
    turn = data + (epoch & 1).to(tl.int64) * half
    partials = il.pointer(turn, tl.float32)
    results = il.pointer(turn + results_offset, y.dtype.element_ty)
    flags = il.pointer(signals, tl.int32)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    parts_here = flags + 2 * program * WORLD_SIZE
    sums_here = parts_here + WORLD_SIZE
    # Rows of a tile by owner, and where they lie in its slot.
    owner = tl.arange(0, BLOCK_N) // OWNED
    line = tl.arange(0, BLOCK_N) % OWNED
    for tile in range(program, tiles, programs):
        rows, tokens, place, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
        part = partial_product(
            x, w, rows, tokens, N, B, K, stride_x, stride_w, BLOCK_N, BLOCK_K, BLOCK_B, EVEN_K, PRECISION
        )
        slot = ((me * tiles + tile) * OWNED).to(tl.int64)
        target = partials + (slot + line[:, None]) * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
        il.put(target, part, owner[:, None], group, mask)
    il.signal(parts_here + me + tl.zeros_like(peers), stamp, peers, group, others)

    arrived = il.wait(parts_here + peers, stamp, peers, program, group, others)
    mine = tl.arange(0, BLOCK_OWNED)
    first = me * OWNED
    for tile in range(program, tiles, programs):
        rows, tokens, place, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
        rows = tl.min(rows) + first + mine
        place = rows[:, None].to(tl.int64) * ((B + BLOCK_B - 1) // BLOCK_B * BLOCK_B) + tokens[None, :]
        held = (mine < OWNED) & (first + mine < BLOCK_N)
        if EVEN:
            mask = held[:, None] & (tl.zeros_like(tokens)[None, :] == 0)
        else:
            mask = (held & (rows < N))[:, None] & (tokens[None, :] < B)
        total = tl.zeros([BLOCK_OWNED, BLOCK_B], tl.float32)
        for source in tl.static_range(WORLD_SIZE):
            slot = ((source * tiles + tile) * OWNED).to(tl.int64)
            target = partials + (slot + mine[:, None]) * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
            total += il.get(target, me, group, mask, 0.0)
        if bias is not None:
            total += tl.load(bias + tl.minimum(rows, N - 1)).to(tl.float32)[:, None]
        value = tl.where(arrived, total, float("nan")).to(y.dtype.element_ty)
        for step in tl.static_range(1, WORLD_SIZE + 1):
            il.put(results + place, value, (me + step) % WORLD_SIZE, group, mask)
    il.signal(sums_here + me + tl.zeros_like(peers), stamp, peers, group, others)

    arrived = il.wait(sums_here + peers, stamp, peers, program, group, others)
    for tile in range(program, tiles, programs):
        rows, tokens, place, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
        total = il.get(results + place, me, group, mask, 0.0).to(tl.float32)
        _store_output(y, None, tl.where(arrived, total, float("nan")), rows, tokens, mask, N)
    il.advance_epoch(epochs, epoch)
