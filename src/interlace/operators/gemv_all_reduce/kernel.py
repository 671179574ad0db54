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
def _multiply(weight, value):
    """Products of one token, eight neighbours added up: within a thread, so that sums take few
    registers.
    """
    products = weight.to(tl.float32) * value.to(tl.float32)[None, :]
    return tl.sum(products.reshape([products.shape[0], products.shape[1] // 8, 8]), 2)


@triton.jit
def _load_last(x, w, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """The last ``BLOCK_K`` columns or fewer of weight and token: the first to be loaded."""
    k = (K - 1) // BLOCK_K * BLOCK_K + tl.arange(0, BLOCK_K)
    value = tl.load(x + k) if EVEN_K else tl.load(x + k, mask=k < K, other=0.0)
    return _load_weight(w, k, K, not EVEN_K), value


@triton.jit
def _one_token(x, w, last, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """``sum over k of w[:, k] * x[k]``, without the matrix unit; w is a tile of pointers to rows.
    """
    # What is left over is used last: kept in registers, it costs no trip to memory of its own. A
    # whole block would take registers that other programs need.
    if EVEN_K:
        accumulator = _multiply(last[0], last[1])
    else:
        accumulator = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for start in range(0, (K - 1) // BLOCK_K * BLOCK_K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        accumulator += _multiply(_load_weight(w, k, K, False), tl.load(x + k))
    if not EVEN_K:
        accumulator += _multiply(last[0], last[1])
    return tl.sum(accumulator, 1)[:, None]


@triton.jit
def _add_product(accumulator, x, w, k, K, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """One step along K with several tokens, by the matrix unit."""
    weight = _load_weight(w, k, K, MASKED)
    pointers = x[None, :] + k[:, None]
    value = tl.load(pointers, mask=k[:, None] < K, other=0.0) if MASKED else tl.load(pointers)
    if PRECISION == "upcast":  # the interpreter cannot multiply bfloat16
        return tl.dot(weight.to(tl.float32), value.to(tl.float32), accumulator, input_precision="ieee")
    else:
        return tl.dot(weight, value, accumulator, input_precision=PRECISION)


@triton.jit
def _several_tokens(
    x, w, K, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``sum over k of w[:, k] * x[:, k]``, by the matrix unit; x and w are tiles of pointers to
    rows.
    """
    k = tl.arange(0, BLOCK_K)
    whole = K if EVEN_K else K // BLOCK_K * BLOCK_K
    accumulator = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for start in range(0, whole, BLOCK_K):
        accumulator = _add_product(accumulator, x, w, start + k, K, PRECISION, False)
    if not EVEN_K:
        accumulator = _add_product(accumulator, x, w, whole + k, K, PRECISION, True)
    return accumulator


@triton.jit
def _operands(
    tile, x, w, N, B, K, stride_x, stride_w,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Pointers to a tile's tokens and rows of weights; and, with one token, the columns that are
    loaded first.

    Rows and tokens outside the matrix repeat the last one; whoever stores the tile masks them.
    """
    rows, tokens, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
    w = w + tl.minimum(rows, N - 1).to(tl.int64) * stride_w
    if BLOCK_B == 1:
        x = x + tl.minimum(tl.sum(tokens), B - 1).to(tl.int64) * stride_x
        return x, w, _load_last(x, w, K, BLOCK_K, EVEN_K)
    else:
        # Nothing; Triton 3.6 cannot return None in a tuple
        return x + tl.minimum(tokens, B - 1).to(tl.int64) * stride_x, w, 0


@triton.jit
def _part(
    operands, K, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """This rank's part of one tile, ``sum over k of w[rows, k] * x[tokens, k]``, float32
    ``[BLOCK_N, BLOCK_B]``.
    """
    x, w, last = operands
    if BLOCK_B == 1:
        return _one_token(x, w, last, K, BLOCK_N, BLOCK_K, EVEN_K)
    else:
        return _several_tokens(x, w, K, BLOCK_N, BLOCK_B, BLOCK_K, EVEN_K, PRECISION)


@triton.jit
def _tile(tile, N, B, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, EVEN: tl.constexpr):
    """Rows and tokens of a tile, and its mask; tiles of the same rows follow one another, so that
    weights stay in the L2.
    """
    token_tiles = (B + BLOCK_B - 1) // BLOCK_B
    rows = tile // token_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tile % token_tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    return rows, tokens, _mask(rows, tokens, N, B, EVEN)


@triton.jit
def _mask(rows, tokens, N, B, EVEN: tl.constexpr):
    if EVEN:
        return tl.full([rows.shape[0], tokens.shape[0]], 1, tl.int1)
    else:
        return (rows[:, None] < N) & (tokens[None, :] < B)


# Words. Two tokens of a row share one where VALUES is 2; the halves of a pair are then the last
# dimension.


@triton.jit
def _words(tile, rows, N, B, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, EVEN: tl.constexpr, VALUES: tl.constexpr):
    """Where the words of a tile's ``rows`` lie among all of a rank's, and their mask.

    There is room for whole tiles: then the compiler knows how words are aligned.
    """
    token_tiles = (B + BLOCK_B - 1) // BLOCK_B
    columns = tile % token_tiles * (BLOCK_B // VALUES) + tl.arange(0, BLOCK_B // VALUES)
    place = rows[:, None].to(tl.int64) * (token_tiles * BLOCK_B // VALUES) + columns[None, :]
    return place, _mask(rows, columns * VALUES, N, B, EVEN)


@triton.jit
def _in_words(part, VALUES: tl.constexpr):
    return part if VALUES == 1 else part.reshape([part.shape[0], part.shape[1] // 2, 2])


@triton.jit
def _out_of_words(values, VALUES: tl.constexpr):
    return values if VALUES == 1 else values.reshape([values.shape[0], values.shape[1] * 2])


@triton.jit
def _announce(calls, stamp, group, WORLD_SIZE: tl.constexpr):
    """Tell all peers which call this is. Pairs carry the epoch without its mark; this word carries
    both.
    """
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))[None, :]
    nothing = tl.zeros(peers.shape, tl.float32)
    il.put_packed(calls + il.rank(group) + peers * 0, nothing, stamp, peers, group, peers < WORLD_SIZE)


@triton.jit
def _agree(calls, stamp, group, WORLD_SIZE: tl.constexpr):
    """Whether all peers are in this call (0 or 1), by what :func:`_announce` of theirs said; after
    this program's own puts.
    """
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))[None, :]
    nothing = tl.sum(tl.ravel(il.get_packed(calls + peers, stamp, peers, 0, group, peers < WORLD_SIZE)))
    return (nothing == 0).to(tl.int32)  # else NaN


@triton.jit
def _store_output(y, bias, total, rows, tokens, mask, N):
    if bias is not None:
        total += tl.load(bias + tl.minimum(rows, N - 1)).to(tl.float32)[:, None]
    tl.store(y + tokens[None, :].to(tl.int64) * N + rows[:, None], total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["words", "call", "half", "slot", "tiles"])
def gemv_all_reduce_one_shot(
    x, w, bias, y, words, epochs, ctx, call, half, slot, N, B, K, tiles, stride_x, stride_w,
    WORLD_SIZE: tl.constexpr, ONE_TILE: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``y = sum over ranks of x @ w.T, + bias``: every rank sends its part of every output to every
    peer.

    Protocol: a program computes its tiles' partial sums and puts them as packed words into slot
    ``[epoch % 2][rank]`` of every peer; then it waits, word by word, for the same tiles of the
    other ranks and adds them in rank order. A half is written again two calls later: by then its
    reader has sent the words of the call in between, which it did after reading. Pairs carry no
    mark: the last program waits for the word of every peer's program 0 that does, while its own
    sums are on their way, and makes y NaN if one is of another call.

    Example: two ranks, N = 2, partial sums ``[1, 2]`` on rank 0 and ``[10, 20]`` on rank 1. Rank
    0's slot 1 receives ``(10, e) (20, e)``, rank 1's slot 0 ``(1, e) (2, e)``; both compute ``[11,
    22]``.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if ONE_TILE:
        operands = _operands(program, x, w, N, B, K, stride_x, stride_w, BLOCK_N, BLOCK_B, BLOCK_K, EVEN, EVEN_K)
    # Asked for once the first weights are under way: the compiler waits at once for what all
    # threads share.
    epoch, group = il.next_epoch(epochs), il.join(ctx)
    if ONE_TILE:
        part = _part(operands, K, BLOCK_N, BLOCK_B, BLOCK_K, EVEN_K, PRECISION)
    me = il.rank(group)
    stamp = il.mark(epoch, call)
    slot = tl.multiple_of(slot.to(tl.int64), 16)
    calls = il.pointer(words, tl.int64) + tl.multiple_of((epoch & 1).to(tl.int64) * half, 16)
    slots = calls + 16
    agreed = 1
    if (VALUES == 2) & (program == 0):
        _announce(calls, stamp, group, WORLD_SIZE)
    if ONE_TILE:
        # The own part stays in registers.
        part = _in_words(part, VALUES)
        rows, tokens, mask = _tile(program, N, B, BLOCK_N, BLOCK_B, EVEN)
        place, there = _words(program, rows, N, B, BLOCK_N, BLOCK_B, EVEN, VALUES)
        for step in tl.static_range(1, WORLD_SIZE):
            il.put_packed(slots + me * slot + place, part, stamp, (me + step) % WORLD_SIZE, group, there, VALUES)
        if (VALUES == 2) & (program == programs - 1):
            agreed = _agree(calls, stamp, group, WORLD_SIZE)
        total = il.sum_packed(slots + place, part, slot, stamp, program, group, there, WORLD_SIZE, VALUES)
        _store_output(y, bias, _out_of_words(total, VALUES), rows, tokens, mask, N)
    else:
        # All tiles are sent before the first is waited for.
        for tile in range(program, tiles, programs):
            operands = _operands(tile, x, w, N, B, K, stride_x, stride_w, BLOCK_N, BLOCK_B, BLOCK_K, EVEN, EVEN_K)
            part = _part(operands, K, BLOCK_N, BLOCK_B, BLOCK_K, EVEN_K, PRECISION)
            part = _in_words(part, VALUES)
            rows, tokens, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
            place, there = _words(tile, rows, N, B, BLOCK_N, BLOCK_B, EVEN, VALUES)
            for step in tl.static_range(1, WORLD_SIZE + 1):
                il.put_packed(slots + me * slot + place, part, stamp, (me + step) % WORLD_SIZE, group, there, VALUES)
        if (VALUES == 2) & (program == programs - 1):
            agreed = _agree(calls, stamp, group, WORLD_SIZE)
        for tile in range(program, tiles, programs):
            rows, tokens, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
            place, there = _words(tile, rows, N, B, BLOCK_N, BLOCK_B, EVEN, VALUES)
            total = il.sum_packed(slots + place, None, slot, stamp, tile, group, there, WORLD_SIZE, VALUES)
            _store_output(y, bias, _out_of_words(total, VALUES), rows, tokens, mask, N)
    if agreed == 0:  # words that came belong to other calls
        il.fill_nan(y, (tl.zeros([], tl.int64) + B) * N)
    il.clear_old(il.pointer(words, tl.int64), 2 * half, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["words", "call", "half", "slot", "tiles"])
def gemv_all_reduce_two_phase(
    x, w, bias, y, words, epochs, ctx, call, half, slot, N, B, K, tiles, stride_x, stride_w,
    WORLD_SIZE: tl.constexpr, ONE_TILE: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr, OWNED: tl.constexpr, BLOCK_OWNED: tl.constexpr,
):  # fmt: skip
    """The same sum, each rank reducing and broadcasting ``OWNED`` rows of every tile.

    Protocol: a program puts each row of its partial tiles as packed words at the row's owner (one
    store, whose peer is a tile), in slot ``[epoch % 2][rank]``. It waits for the words of the rows
    that it owns, adds them in rank order, adds the bias, rounds, and puts the results as packed
    words at every peer, behind the slots. Then it waits for its tiles' results. Partial sums of a
    half are written again two calls later: the writer has then had the results of the call in
    between, which their owner sent after it had read; and results are sent only to those who have
    sent their parts. Pairs as in :func:`gemv_all_reduce_one_shot`.

    Example: two ranks, BLOCK_N = 2: rank 0 owns row 0 and rank 1 row 1 of every tile. With parts
    ``[1, 2]`` and ``[10, 20]``, rank 1 sends 10 to rank 0, which adds 1 and sends 11 back; rank 0
    sends 2 and gets 22.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if ONE_TILE:
        operands = _operands(program, x, w, N, B, K, stride_x, stride_w, BLOCK_N, BLOCK_B, BLOCK_K, EVEN, EVEN_K)
    # Asked for once the first weights are under way: the compiler waits at once for what all
    # threads share.
    epoch, group = il.next_epoch(epochs), il.join(ctx)
    if ONE_TILE:
        part = _part(operands, K, BLOCK_N, BLOCK_B, BLOCK_K, EVEN_K, PRECISION)
    stamp = il.mark(epoch, call)
    slot = tl.multiple_of(slot.to(tl.int64), 16)
    calls = il.pointer(words, tl.int64) + tl.multiple_of((epoch & 1).to(tl.int64) * half, 16)
    slots = calls + 16
    results = slots + WORLD_SIZE * slot
    agreed = 1
    if (VALUES == 2) & (program == 0):
        _announce(calls, stamp, group, WORLD_SIZE)
    if ONE_TILE:
        _send_part(program, part, slots, slot, stamp, group, N, B, EVEN, VALUES, OWNED)
    else:
        for tile in range(program, tiles, programs):
            operands = _operands(tile, x, w, N, B, K, stride_x, stride_w, BLOCK_N, BLOCK_B, BLOCK_K, EVEN, EVEN_K)
            part = _part(operands, K, BLOCK_N, BLOCK_B, BLOCK_K, EVEN_K, PRECISION)
            _send_part(tile, part, slots, slot, stamp, group, N, B, EVEN, VALUES, OWNED)
    if (VALUES == 2) & (program == programs - 1):
        agreed = _agree(calls, stamp, group, WORLD_SIZE)
    for tile in range(program, tiles, programs):
        _send_sum(
            tile, y, bias, slots, slot, results, stamp, group, N, B,
            WORLD_SIZE, EVEN, VALUES, BLOCK_N, BLOCK_B, OWNED, BLOCK_OWNED,
        )  # fmt: skip
    owner = (tl.arange(0, BLOCK_N) // OWNED)[:, None]
    for tile in range(program, tiles, programs):
        rows, tokens, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
        place, there = _words(tile, rows, N, B, BLOCK_N, BLOCK_B, EVEN, VALUES)
        value = il.get_packed(results + place, stamp, owner, tile, group, there, VALUES)
        _store_output(y, None, _out_of_words(value, VALUES), rows, tokens, mask, N)
    if agreed == 0:  # words that came belong to other calls
        il.fill_nan(y, (tl.zeros([], tl.int64) + B) * N)
    il.clear_old(il.pointer(words, tl.int64), 2 * half, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit
def _send_part(
    tile, part, slots, slot, stamp, group, N, B, EVEN: tl.constexpr, VALUES: tl.constexpr,
    OWNED: tl.constexpr
):  # fmt: skip
    """Put each row of a partial tile at the row's owner."""
    rows, tokens, mask = _tile(tile, N, B, part.shape[0], part.shape[1], EVEN)
    place, there = _words(tile, rows, N, B, part.shape[0], part.shape[1], EVEN, VALUES)
    line = tl.arange(0, part.shape[0])
    target = slots + il.rank(group) * slot + _owned_words(tile, line % OWNED, OWNED, part.shape[1] // VALUES)
    il.put_packed(target, _in_words(part, VALUES), stamp, (line // OWNED)[:, None], group, there, VALUES)


@triton.jit
def _send_sum(
    tile, y, bias, slots, slot, results, stamp, group, N, B,
    WORLD_SIZE: tl.constexpr, EVEN: tl.constexpr, VALUES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, OWNED: tl.constexpr, BLOCK_OWNED: tl.constexpr,
):  # fmt: skip
    """Add up the rows of a tile that this rank owns, and put the results at every peer."""
    me = il.rank(group)
    mine = tl.arange(0, BLOCK_OWNED)
    rows, tokens, mask = _tile(tile, N, B, BLOCK_N, BLOCK_B, EVEN)
    rows = tl.min(rows) + me * OWNED + mine
    place, there = _words(tile, rows, N, B, BLOCK_N, BLOCK_B, EVEN, VALUES)
    there = there & ((mine < OWNED) & (me * OWNED + mine < BLOCK_N))[:, None]
    here = slots + _owned_words(tile, mine, OWNED, BLOCK_B // VALUES)
    total = _out_of_words(il.sum_packed(here, None, slot, stamp, tile, group, there, WORLD_SIZE, VALUES), VALUES)
    if bias is not None:
        total += tl.load(bias + tl.minimum(rows, N - 1)).to(tl.float32)[:, None]
    value = _in_words(total.to(y.dtype.element_ty).to(tl.float32), VALUES)
    for step in tl.static_range(1, WORLD_SIZE + 1):
        il.put_packed(results + place, value, stamp, (me + step) % WORLD_SIZE, group, there, VALUES)


@triton.jit
def _owned_words(tile, line, OWNED: tl.constexpr, WORDS: tl.constexpr):
    """Where the words of an owner's ``line`` of ``tile`` lie in a slot."""
    return (tile * OWNED + line[:, None]).to(tl.int64) * WORDS + tl.arange(0, WORDS)[None, :]
