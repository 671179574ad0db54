"""The kernels of ``impl="decode"``: few tokens, experts' weights read once.

README.md explains the protocols.

A row's place follows from its source and its token, so nothing is numbered before it is sent, and
no counts are exchanged: each rank finds the rows of its experts in what all ranks have sent.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.float8 import quantise_rows, words_of_float8
from interlace.gemm.kernels.tiles import SCALED, add_bias, add_product
from interlace.language.sizes import next_power_of_2
from interlace.operators.mixture_of_experts import layout
from interlace.operators.mixture_of_experts.kernels.activation import activate
from interlace.operators.mixture_of_experts.kernels.plan import MAX_RANKS, expert_of, pick
from interlace.operators.mixture_of_experts.kernels.tiles import split_gate_and_up

SENDERS = tl.constexpr(layout.SENDERS)
DECODE_DONE = tl.constexpr(layout.DECODE_DONE)
DECODE_FINISHED = tl.constexpr(layout.DECODE_FINISHED)


class Lists(NamedTuple):
    """The rows of this rank's experts, in this rank's memory.

    Attributes:
        entries: int32 ``[L, R T k]``: for each row of an expert, its source's slots before it plus
            its slot, in rising order.
        counts: int32 ``[L + 1]``: rows of each expert; behind them 1 if every rank is in the call,
            else 0.
        L: Experts of this rank.
        length: The width of ``entries``, R T k.
    """

    entries: Any
    counts: Any
    L: Any
    length: Any


class ExpertProduct(NamedTuple):
    """The product of rows with their experts' weights.

    Attributes:
        rows: The rows that are multiplied: tokens, or their activations.
        weights: ``[L, lines, inner]``, which ``Tiling.w_along_k`` orders in memory.
        row_scales, scales: Of float8 operands those of their blocks, ``[all rows, inner / 128]``
            and ``[L, lines / 128, inner / 128]``; None for others.
        bias: ``[L, lines]``, or None.
        target: Where the results go: the activations, or every rank's results.
        lines, inner: The sizes of an expert's weight.
        half: Lines of gate before those of up, of which a tile has as many of each; None if there
            is no up, or a line of each in turn.
        slots: The slots of a rank.
    """

    rows: Any
    weights: Any
    row_scales: Any
    scales: Any
    bias: Any
    target: Any
    lines: Any
    inner: Any
    half: Any
    slots: Any


class DecodeTiling(NamedTuple):
    """The constants that say how a product is cut into tiles.

    Attributes:
        tiling: The tiles, of which ``block_n`` counts lines of the weight.
        tail: Rows that an expert's last tile may have beyond ``block_m``.
        is_even: Whether ``block_k`` divides the inner dimension.
        local_lanes: A power of two that is at least the number of experts of a rank.
    """

    tiling: Any
    tail: Any
    is_even: Any
    local_lanes: Any


class Shares(NamedTuple):
    """The constants that say how many programs do what.

    Attributes:
        programs: Programs in front: those that send, or those that multiply.
        columns: Columns that a program moves at a time.
        top_k: Experts per token.
        align: A power of two that divides the width of a token.
        ffn_align: A power of two that divides the inner width of an expert.
        slots: Slots that a program looks at a time, where it looks at any.
    """

    programs: Any
    columns: Any
    top_k: Any
    align: Any
    ffn_align: Any
    slots: Any


@triton.jit(do_not_specialize=["call", "half", "rows_at", "tokens", "L", "hidden_groups"])
def gather_tokens(
    x, experts, entries, counts, landing, signals, epochs, ctx, call, half, rows_at, tokens, L,
    hidden_groups, scales_at, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, SHARES: tl.constexpr,
):
    """Send tokens and their routing to the ranks that need them; list the rows of each expert.

    The landing holds, in each half, the experts that every rank's slots name, int32 ``[R, T k]``,
    and ``rows_at`` bytes behind their start the tokens ``[R, T, hidden]``. A token goes once to
    each rank that has one of its experts. Unless ``scales_at`` is None, it goes as float8, and its
    scales ``[R, T, hidden / 128]`` lie so many bytes behind the start.

    **Protocol.** The first ``SHARES.programs`` programs put, and each signals every rank,
    ``[source][program]`` in the set of the epoch's parity. The others, one per expert of this rank,
    wait for all signals of all ranks; so when the kernel ends, everything has arrived, and every
    rank is in the call, which later kernels take for leave to write results to it. Halves take
    turns: a rank that puts into a half again has waited, in the call in between, for the rank that
    read it.

    **Example.** Two ranks, experts 0 and 1, one on each; slots of rank 0 name [1, 0, 1], those of
    rank 1 [0], one slot per token. Rank 0 puts tokens 0 and 2 to rank 1, and token 1 to itself.
    Rank 0's list of expert 0 is [1, 3]: its own slot 1, and slot 0 of rank 1, which has three
    before it.
    """
    SENDING: tl.constexpr = SHARES.programs
    TOP_K: tl.constexpr = SHARES.top_k
    BLOCK: tl.constexpr = SHARES.slots
    COLS: tl.constexpr = SHARES.columns
    pid = tl.program_id(0)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    arrived = il.in_turn(il.pointer(signals, tl.int32), epoch, MAX_RANKS * SENDERS)
    slots = tokens * TOP_K
    own_half = landing + (epoch & 1).to(tl.int64) * half
    named = il.pointer(own_half, tl.int32)
    if pid < SENDING:
        for first in range(pid * BLOCK, slots, SENDING * BLOCK):
            slot = first + tl.arange(0, BLOCK)
            expert, _ = expert_of(experts, slot, slots, WORLD_SIZE * L)
            for step in tl.static_range(WORLD_SIZE):
                peer = (rank + 1 + step) % WORLD_SIZE
                il.put(named + rank * slots + slot, expert, peer, group, slot < slots)
        hidden = hidden_groups * SHARES.align
        rows = il.pointer(own_half + rows_at, DTYPE)
        pieces = (hidden + COLS - 1) // COLS
        lanes = tl.arange(0, next_power_of_2(TOP_K))
        for task in range(pid, tokens * pieces, SENDING):
            token, column = task // pieces, task % pieces * COLS + tl.arange(0, COLS)
            chosen, _ = expert_of(experts + token * TOP_K, lanes, TOP_K, WORLD_SIZE * L)
            value = tl.load(x + hidden.to(tl.int64) * token + column, mask=column < hidden)
            start = hidden.to(tl.int64) * (rank * tokens + token)
            target, mask = rows + start + column, column < hidden
            if scales_at is not None:
                # Columns that are not there would have a part in no scale but their own.
                quantised, scale = quantise_rows(tl.where(mask, value, 0.0)[None, :])
                value = tl.ravel(words_of_float8(quantised))
                word = task % pieces * (COLS // 4) + tl.arange(0, COLS // 4)
                target = il.pointer(own_half + rows_at, tl.int32) + start // 4 + word
                mask = word < hidden // 4
                block = task % pieces * (COLS // SCALED) + tl.arange(0, COLS // SCALED)
                scales = il.pointer(own_half + scales_at, tl.float32)
                scale_target = scales + start // SCALED + block
            for step in tl.static_range(WORLD_SIZE):
                peer = (rank + 1 + step) % WORLD_SIZE
                of_peer = (chosen >= peer * L) & (chosen < (peer + 1) * L)
                if tl.sum(of_peer.to(tl.int32)) > 0:
                    il.put(target, value, peer, group, mask)
                    if scales_at is not None:
                        has_block = block < hidden // SCALED
                        il.put(scale_target, tl.ravel(scale), peer, group, has_block)
        # Each sending program signals for its own puts, so that no counter has to find the last of
        # them. It signals this rank, too: the programs that list rows read what other programs of
        # this launch have put.
        everyone = tl.arange(0, next_power_of_2(WORLD_SIZE))
        own_signals = arrived + rank * SENDERS + pid + everyone * 0
        il.signal(own_signals, stamp, everyone, group, everyone < WORLD_SIZE)
    else:
        local = pid - SENDING
        LANES: tl.constexpr = SENDING * next_power_of_2(WORLD_SIZE)
        source, sender = tl.arange(0, LANES) // SENDING, tl.arange(0, LANES) % SENDING
        complete = il.wait(
            arrived + source * SENDERS + sender, stamp, source, 0, group, source < WORLD_SIZE
        )
        length = WORLD_SIZE * slots
        count = 0
        for first in range(0, length, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            expert = il.get(named + entry, rank, group, entry < length, -1)
            # If a rank is missing, the lists stay empty, and the later kernels neither compute nor
            # put.
            is_own = (expert == rank * L + local).to(tl.int32) * complete.to(tl.int32)
            place = count + tl.cumsum(is_own, 0) - is_own
            tl.store(entries + local.to(tl.int64) * length + place, entry, mask=is_own > 0)
            count += tl.sum(is_own)
        tl.store(counts + local, count)
        if local == 0:
            tl.store(counts + L, complete.to(tl.int32))


class ExpertRows(NamedTuple):
    """Rows of an expert that a program multiplies at a time.

    Attributes:
        row: Their numbers among the expert's rows, ``[n]``.
        exists: Which of them the expert has.
        entry: Their entries in the expert's list; 0 for those that do not exist.
    """

    row: Any
    exists: Any
    entry: Any


@triton.jit
def _tiles_of(lists, tiles_n, TILES: tl.constexpr):
    """Return, for each expert of this rank, its rows, the rows before it, its tiles of rows, and
    the tiles up to its last one.

    An expert's last tile has ``TILES.tail`` rows more than the others.
    """
    BLOCK_M: tl.constexpr = TILES.tiling.block_m
    TAIL: tl.constexpr = TILES.tail
    lanes = tl.arange(0, TILES.local_lanes)
    rows = tl.load(lists.counts + lanes, mask=lanes < lists.L, other=0)
    tiles_m = (tl.maximum(rows - TAIL, tl.minimum(rows, 1)) + BLOCK_M - 1) // BLOCK_M
    return rows, tl.cumsum(rows, 0) - rows, tiles_m, tl.cumsum(tiles_m * tiles_n, 0)


@triton.jit
def _tile(item, tiles, tiles_n, TILES: tl.constexpr):
    """Return an item's expert, the expert's first row, its rows, the tile's first row within the
    expert, whether the expert has rows beyond its whole tiles that this one takes as well, and the
    tile of columns.

    Tiles of the same columns follow one another, so that weights are in the L2 for all but one.
    """
    BLOCK_M: tl.constexpr = TILES.tiling.block_m
    lanes = tl.arange(0, TILES.local_lanes)
    rows, begins, tiles_m, ends = tiles
    expert = tl.sum((ends <= item).to(tl.int32))
    height = pick(tiles_m, lanes, expert)
    offset = item - pick(ends, lanes, expert) + height * tiles_n
    m, count = offset % height, pick(rows, lanes, expert)
    has_tail = (m == height - 1) & (count > height * BLOCK_M)
    return expert, pick(begins, lanes, expert), count, m * BLOCK_M, has_tail, offset // height


@triton.jit
def _rows(lists, expert, first, count, SIZE: tl.constexpr):
    """Return ``SIZE`` of an expert's ``count`` rows, from ``first`` on."""
    row = first + tl.arange(0, SIZE)
    exists = row < count
    own = lists.entries + expert.to(tl.int64) * lists.length
    return ExpertRows(row, exists, tl.load(own + row, mask=exists, other=0))


@triton.jit
def _multiply_tiles(
    product, lists, programs, group, DTYPE: tl.constexpr, SHARES: tl.constexpr,
    TILES: tl.constexpr, FORM: tl.constexpr,
):
    """Compute this program's tiles of a product, of ``programs`` programs' in all.

    With ``FORM``, the rows are tokens, and the activation of the results is stored. Without, the
    rows are activations, and results go to the slots that they are of.
    """
    BLOCK_M: tl.constexpr = TILES.tiling.block_m
    BLOCK_N: tl.constexpr = TILES.tiling.block_n
    TAIL: tl.constexpr = TILES.tail
    tiles_n = (product.lines + BLOCK_N - 1) // BLOCK_N
    tiles = _tiles_of(lists, tiles_n, TILES)
    for item in range(tl.program_id(0), tl.max(tiles[3]), programs):
        expert, begin, count, first, has_tail, n = _tile(item, tiles, tiles_n, TILES)
        rows = _rows(lists, expert, first, count, BLOCK_M)
        numbers = _row_numbers(rows, begin, SHARES, FORM)
        bias, target, scales = product.bias, product.target, product.scales
        if product.bias is not None:
            bias = product.bias + expert * product.lines
        if product.scales is not None:
            scales += expert * (product.lines // SCALED) * (product.inner // SCALED)
        if FORM is not None:
            target = target + begin.to(tl.int64) * (product.lines // FORM.gates)
        # The product with this expert's weight and bias, and its rows of the activations.
        of_expert = ExpertProduct(
            product.rows, product.weights + expert.to(tl.int64) * product.lines * product.inner,
            product.row_scales, scales, bias, target, product.lines, product.inner, product.half,
            product.slots,
        )
        column = n * BLOCK_N
        il.record("tile", item, group)
        if TAIL > 0 and has_tail:
            more = _rows(lists, expert, first + BLOCK_M, count, TAIL)
            more_numbers = _row_numbers(more, begin, SHARES, FORM)
            acc, tail = _multiply(
                numbers, rows.exists, more_numbers, more.exists, of_expert, column, TILES
            )
            _store(of_expert, tail, more, column, group, DTYPE, FORM)
        else:
            acc = _multiply(numbers, rows.exists, None, None, of_expert, column, TILES)
        il.record("computed", item, group)
        _store(of_expert, acc, rows, column, group, DTYPE, FORM)


@triton.jit
def _row_numbers(rows, begin, SHARES: tl.constexpr, FORM: tl.constexpr):
    """Return the numbers of the rows of an expert among all that are multiplied, int64: of tokens,
    or of activations, of which ``begin`` is the expert's first.
    """
    if FORM is None:
        return (begin + rows.row).to(tl.int64)
    else:
        return (rows.entry // SHARES.top_k).to(tl.int64)


@triton.jit
def _store(product, acc, rows, column, group, DTYPE: tl.constexpr, FORM: tl.constexpr):
    """Add the bias to a tile of an expert's rows, and store their activation, or put each into its
    slot of its source.

    Args:
        acc: float32 ``[n, block_n]``, from line ``column`` of the weight on.
    """
    SIZE: tl.constexpr = acc.shape[0]
    LINES: tl.constexpr = acc.shape[1]
    if FORM is None:
        if product.bias is not None:
            acc = add_bias(acc, product.bias, column, product.lines)
        columns = column + tl.arange(0, LINES)[None, :]
        slot = (rows.entry % product.slots).to(tl.int64)[:, None]
        pointers = product.target + slot * product.lines + columns
        mask = rows.exists[:, None] & (columns < product.lines)
        il.put(pointers, acc.to(DTYPE), (rows.entry // product.slots)[:, None], group, mask)
    else:
        ffn = product.lines // FORM.gates
        if product.bias is not None:
            line, has_line = _lines(product, column, LINES)
            added = tl.load(product.bias + line, mask=has_line, other=0.0)
            acc += added.to(tl.float32)[None, :]
        if FORM.gates == 1:
            value = activate(acc, None, FORM)
        else:
            if FORM.halves:
                gate, up = split_gate_and_up(acc)
            else:
                gate, up = tl.split(tl.reshape(acc, [SIZE, LINES // 2, 2]))
            value = activate(gate, up, FORM)
        columns = column // FORM.gates + tl.arange(0, LINES // FORM.gates)[None, :]
        pointers = product.target + rows.row.to(tl.int64)[:, None] * ffn + columns
        tl.store(pointers, value.to(DTYPE), mask=rows.exists[:, None] & (columns < ffn))


@triton.jit
def _lines(product, column, LINES: tl.constexpr):
    """Return where the lines of a tile lie in memory, and which of them the weight has.

    With gate before up, a tile has the gate's lines before those of up, too: neighbours in a tile
    are neighbours in memory, which a thread loads at once where weights are along N.

    Args:
        column: The number of the tile's first line, of gate and up together.
    """
    number = tl.arange(0, LINES)
    if product.half is None:
        line = column + number
        return line, line < product.lines
    else:
        line = column // 2 + number % (LINES // 2)
        return line + number // (LINES // 2) * product.half, line < product.half


@triton.jit
def _line_factors(product, column, block, LINES: tl.constexpr):
    """Return the scales of ``LINES`` lines of a float8 weight, float32, in one block along K.

    At most 128 lines of a tile are of one block, or gate's are of one and those of up of another:
    so one number or two are loaded, and none for each line.

    Args:
        column: The first line.
        block: The number of the block along K.
    """
    own = product.scales + block
    row_stride = product.inner // SCALED
    if product.half is None:
        return tl.full([LINES], 1.0, tl.float32) * tl.load(own + column // SCALED * row_stride)
    else:
        of_gate = own + column // 2 // SCALED * row_stride
        of_up = of_gate + product.half // SCALED * row_stride
        return tl.where(tl.arange(0, LINES) < LINES // 2, tl.load(of_gate), tl.load(of_up))


@triton.jit
def _multiply(
    rows, exists, tail_rows, tail_exists, product, column, TILES: tl.constexpr,
):
    """Multiply rows by lines of a weight: float32 ``[block_m, block_n]``, and ``[tail, block_n]``
    as well if there is a tail.

    The weight is the left operand: its lines are as many as tensor cores take at a time, while the
    rows are few.

    Args:
        rows: ``[block_m]`` numbers of the rows.
        exists: Which rows exist; the others count as zero.
        tail_rows, tail_exists: More rows, by which each line that has been loaded is multiplied as
            well; or None, as for float8.
        column: The first line.
    """
    BLOCK_M: tl.constexpr = TILES.tiling.block_m
    BLOCK_N: tl.constexpr = TILES.tiling.block_n
    BLOCK_K: tl.constexpr = TILES.tiling.block_k
    W_ALONG_K: tl.constexpr = TILES.tiling.w_along_k
    EVEN: tl.constexpr = TILES.is_even
    inner = product.inner
    line, is_line = _lines(product, column, BLOCK_N)
    if W_ALONG_K:
        # Lines that are not there are read as the first one; the store masks their results.
        left_lines = product.weights + tl.where(is_line, line, 0).to(tl.int64)[:, None] * inner
    else:
        # A thread loads neighbouring lines at once, so they are masked.
        has_line = is_line[:, None]
        left_lines = product.weights + line[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if tail_rows is not None:
        tail = tl.zeros([BLOCK_N, tail_rows.shape[0]], tl.float32)
    factors, row_factors = None, None
    if product.scales is not None:
        row_scales = product.row_scales + rows * (inner // SCALED)
        factors = _line_factors(product, column, 0, BLOCK_N)
        row_factors = tl.load(row_scales, mask=exists, other=0.0)
    for k in range(0, inner, BLOCK_K):
        step = k + tl.arange(0, BLOCK_K)[None, :]
        if product.scales is not None:
            # The next step's scales arrive during this step's product.
            block = tl.minimum(k + BLOCK_K, inner - BLOCK_K) // SCALED
            next_factors = _line_factors(product, column, block, BLOCK_N)
            next_row_factors = tl.load(row_scales + block, mask=exists, other=0.0)
        if not W_ALONG_K:
            left = tl.load(
                left_lines + step.to(tl.int64) * product.lines,
                mask=has_line if EVEN else has_line & (step < inner),
                other=0.0, eviction_policy="evict_first",
            )
        elif EVEN:
            left = tl.load(left_lines + step, eviction_policy="evict_first")
        else:
            left = tl.load(
                left_lines + step, mask=step < inner, other=0.0, eviction_policy="evict_first"
            )
        acc = _add_product(acc, left, product, rows, exists, step, factors, row_factors, EVEN)
        if product.scales is not None:
            factors, row_factors = next_factors, next_row_factors
        if tail_rows is not None:
            tail = _add_product(
                tail, left, product, tail_rows, tail_exists, step, None, None, EVEN
            )
    if tail_rows is not None:
        return tl.trans(acc), tl.trans(tail)
    else:
        return tl.trans(acc)


@triton.jit
def _add_product(
    acc, left, product, rows, exists, step, factors, row_factors, EVEN: tl.constexpr,
):
    """Load columns ``step`` of rows, and add their product with ``left`` to ``acc [block_n,
    rows]``.

    Args:
        factors, row_factors: The scales of the lines of ``left`` and of the rows, float32, if they
            are float8; a step has the 128 elements that share a scale then. None for others.
    """
    mask = exists[:, None] if EVEN else exists[:, None] & (step < product.inner)
    right = tl.load(product.rows + rows[:, None] * product.inner + step, mask=mask, other=0.0)
    if factors is None:
        acc = add_product(acc, left, tl.trans(right))
    else:
        part = add_product(tl.zeros_like(acc), left, tl.trans(right))
        acc += part * (factors[:, None] * row_factors[None, :])
    return acc


@triton.jit(
    do_not_specialize=["call", "half", "rows_at", "L", "length", "hidden_groups", "ffn_groups"]
)
def decode_first_gemm(
    entries, counts, weights, weight_scales, bias, active, landing, epochs, ctx, call, half,
    rows_at, L, length, hidden_groups, ffn_groups, scales_at, DTYPE: tl.constexpr,
    SHARES: tl.constexpr, TILES: tl.constexpr, FORM: tl.constexpr,
):
    """Compute the activation of gate and up of every row of this rank's experts: ``active [rows,
    F]``.

    ``weights`` is ``[L, 2 F, hidden]``: a line of the gate and one of up in turn, or, with
    ``FORM.halves``, all of the gate's before those of up; ``[L, F, hidden]`` if experts have no
    gate. ``bias``, unless it is None, is ``[L, 2 F]`` in the same order. With ``weight_scales [L, 2
    F / 128, hidden / 128]`` weights and tokens are float8. Rows are in the order of
    experts, an expert's in that of its list. Experts without rows are not read.

    **Protocol.** No peer takes part: :func:`gather_tokens` has waited for all that is read.

    **Example.** The two ranks of :func:`gather_tokens`. Rank 0's expert 0 has two rows: its own
    token 1, and token 0 of rank 1.
    """
    epoch, _, group, rank = il.enter(epochs, ctx, call)
    hidden, ffn = hidden_groups * SHARES.align, ffn_groups * SHARES.ffn_align
    own_half = landing + (epoch & 1).to(tl.int64) * half + rows_at
    OPERAND: tl.constexpr = DTYPE if weight_scales is None else tl.float8e4nv
    row_scales = None
    if weight_scales is not None:
        scales = il.pointer(landing + (epoch & 1).to(tl.int64) * half + scales_at, tl.float32)
        row_scales = il.peer_pointer(scales, rank, group)
    product = ExpertProduct(
        il.peer_pointer(il.pointer(own_half, OPERAND), rank, group), il.pointer(weights, OPERAND),
        row_scales, weight_scales, bias, il.pointer(active, DTYPE), FORM.gates * ffn, hidden,
        ffn if FORM.halves else None, None,
    )
    lists = Lists(entries, counts, L, length)
    _multiply_tiles(product, lists, tl.num_programs(0), group, DTYPE, SHARES, TILES, FORM)


@triton.jit(do_not_specialize=["call", "L", "length", "tokens", "hidden_groups", "ffn_groups"])
def decode_second_gemm(
    entries, counts, weights, weight_scales, bias, active, active_scales, experts, scales, y,
    results, signals, epochs, ctx, call, L, length, tokens, hidden_groups, ffn_groups,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, SHARES: tl.constexpr, TILES: tl.constexpr,
):
    """Multiply ``active`` by ``weights [L, hidden, F]`` and add ``bias [L, hidden]``, unless it is
    None; send each row back to its slot, and add each token's rows with their ``scales`` into ``y
    [T, hidden]``.

    The sum is float32 and in the order of the slots. A slot that names no expert counts as zero.
    With ``weight_scales [L, hidden / 128, F / 128]`` weights and activations are float8, which have
    ``active_scales [rows, F / 128]``.

    **Protocol.** The first ``SHARES.programs`` programs multiply and put rows into
    ``results [T k, hidden]`` of their sources, without waiting; the last of them to finish signals
    every rank. The others wait for all ranks' signals, in the set of the epoch's parity, and add.
    The kernel is the last of the call, so it advances the epoch. If a rank was missing in
    :func:`gather_tokens`, nothing is put or signalled, and y is NaN. Results have no halves: a rank
    puts the next ones after it has waited in :func:`gather_tokens` for the rank that reads them.

    **Example.** The two ranks of :func:`gather_tokens`. Rank 0 puts the first row of expert 0 into
    its own slot 1, the second into slot 0 of rank 1; with one slot per token, y is each result
    times the slot's scale.
    """
    MULTIPLYING: tl.constexpr = SHARES.programs
    TOP_K: tl.constexpr = SHARES.top_k
    COLS: tl.constexpr = SHARES.columns
    pid = tl.program_id(0)
    epoch, stamp, group, rank = il.enter(epochs, ctx, call)
    hidden = hidden_groups * SHARES.align
    flags = il.pointer(signals, tl.int32)
    done = il.in_turn(flags + DECODE_DONE, epoch, MAX_RANKS)
    everyone = tl.arange(0, next_power_of_2(WORLD_SIZE))
    complete = tl.load(counts + L)
    returned = il.pointer(results, DTYPE)
    if pid < MULTIPLYING:
        OPERAND: tl.constexpr = DTYPE if weight_scales is None else tl.float8e4nv
        product = ExpertProduct(
            il.pointer(active, OPERAND), il.pointer(weights, OPERAND), active_scales, weight_scales,
            bias, returned, hidden,
            ffn_groups * SHARES.ffn_align, None, tokens * TOP_K,
        )
        lists = Lists(entries, counts, L, length)
        _multiply_tiles(product, lists, MULTIPLYING, group, DTYPE, SHARES, TILES, None)
        # Without every rank nothing was put, and a signal would announce an earlier call's results.
        if complete > 0:
            # The last program has acquired the puts of all, and its signals release them.
            finished = il.peer_pointer(flags + DECODE_FINISHED, rank, group)
            if il.arrive_last(finished, pid, MULTIPLYING):
                # This rank is signalled, too: its adding programs read results that other programs
                # have put.
                is_rank = everyone < WORLD_SIZE
                il.signal(done + rank + everyone * 0, stamp, everyone, group, is_rank)
    else:
        # The programs that wait have higher indices than those that multiply, so they keep none of
        # them from starting.
        arrived = il.wait(done + everyone, stamp, everyone, 0, group, everyone < WORLD_SIZE)
        poison = tl.where(arrived & (complete > 0), 0.0, float("nan"))
        pieces = (hidden + COLS - 1) // COLS
        adding = tl.num_programs(0) - MULTIPLYING
        for task in range(pid - MULTIPLYING, tokens * pieces, adding):
            token, column = task // pieces, task % pieces * COLS + tl.arange(0, COLS)
            acc = tl.zeros([COLS], tl.float32) + poison
            for j in tl.static_range(TOP_K):
                slot = token * TOP_K + j
                _, is_named = expert_of(experts, slot, tokens * TOP_K, WORLD_SIZE * L)
                pointers = returned + hidden.to(tl.int64) * slot + column
                value = il.get(pointers, rank, group, column < hidden, 0.0).to(tl.float32)
                value = tl.where(is_named, value, 0.0)
                # A dropped slot's weight may be NaN, which 0 would not hide.
                acc += value * tl.load(scales + slot, mask=is_named, other=0.0)
            tl.store(
                y + hidden.to(tl.int64) * token + column, acc.to(DTYPE), mask=column < hidden
            )
    # Signals of long ago would look like new ones when epochs' numbers come again.
    il.clear_old(flags, DECODE_FINISHED, epoch, group)
    il.advance_epoch(epochs, epoch)
