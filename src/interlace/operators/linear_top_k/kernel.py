"""The kernel that chooses the highest logits of rows whose columns are shared out over ranks."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.language.sizes import next_power_of_2

_LOWEST = tl.constexpr(-(1 << 63))


@triton.jit(do_not_specialize=["words", "call", "half", "rows", "first"])
def choose_columns(
    logits, values, columns, chosen, chosen_values, words, epochs, ctx, call, half, rows, count,
    stride, first,
    WORLD_SIZE: tl.constexpr, K: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store the K highest logits of each row over all ranks, in their order, and their columns.

    This rank has ``count`` columns, from ``first`` on. Its own candidates are ``values`` and
    ``columns``, ``[rows, K]``; without them, K is 1, and the kernel finds the highest logit itself,
    the first of equal ones. Rows of ``logits`` are ``stride`` apart.

    **Protocol.** Program p has rows p, p + programs, ... Of a row it tells every rank, itself
    included, the values and columns of its candidates in packed words, ``[half][row][source]
    [candidate][value, column]``, and then waits for those of all ranks. Words carry the call's
    stamp, and the halves take turns, as in ``losses_of_rows`` of ``linear_cross_entropy``. Columns
    travel as float32, which holds whole numbers below ``2 ** 24``.

    **Example.** Two ranks, K = 2, logits ``[1, 5, 4]`` and ``[7, 4, 0]``: the ranks tell ``(5, 1),
    (4, 2)`` and ``(7, 3), (4, 4)``. Both store the values ``[7, 5]`` and the columns ``[3, 1]``.
    """
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    PER_RANK: tl.constexpr = 2 * CANDIDATES
    sources = tl.arange(0, next_power_of_2(WORLD_SIZE))[:, None]
    numbers = tl.arange(0, PER_RANK)[None, :]
    candidate = numbers // 2
    is_told = (sources < WORLD_SIZE) & (candidate < K)
    slots = il.pointer(words, tl.int64) + (epoch & 1).to(tl.int64) * half + numbers
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        il.record("tile", row, group)
        if values is None:
            line = logits + (tl.zeros([], tl.int64) + stride) * row
            value, column = _highest(line, count, BLOCK)
            told = tl.where(numbers % 2 == 0, value, (column + first).to(tl.float32))
        else:
            places = row * K + candidate
            value = tl.load(values + places, mask=candidate < K, other=0.0).to(tl.float32)
            column = tl.load(columns + places, mask=candidate < K, other=0) + first
            told = tl.where(numbers % 2 == 0, value, column.to(tl.float32))
        places = slots + row * (WORLD_SIZE * PER_RANK)
        all_told = told + tl.zeros([sources.shape[0], PER_RANK], tl.float32)
        il.put_packed(
            places + me * PER_RANK + sources * 0, all_told, stamp, sources + numbers * 0, group,
            is_told,
        )
        heard = il.get_packed(
            places + sources * PER_RANK, stamp, sources + numbers * 0, row, group, is_told
        )
        their_values, their_columns = tl.split(
            heard.reshape([sources.shape[0], CANDIDATES, 2])
        )
        _, is_candidate = tl.split(
            is_told.to(tl.int32).reshape([sources.shape[0], CANDIDATES, 2])
        )
        # What did not arrive is NaN, in every word of it.
        absent = tl.sum(tl.sum((their_columns != their_columns).to(tl.int32), 1), 0)
        keys = _keys(their_values, their_columns.to(tl.int32))
        keys = tl.where(is_candidate > 0, keys, _LOWEST)
        for place in range(K):
            best = tl.max(tl.max(keys, 1), 0)
            keys = tl.where(keys == best, _LOWEST, keys)
            # Not ``value``, which Triton 3.6 takes for the tile of that name above.
            best_value, best_column = _of_key(best)
            target = row * K + place
            tl.store(chosen_values + target, tl.where(absent == 0, best_value, float("nan")))
            tl.store(chosen + target, tl.where(absent == 0, best_column, -1).to(tl.int64))
    il.clear_old(il.pointer(words, tl.int64), 2 * half, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit
def _highest(line, count, BLOCK: tl.constexpr):
    """Return the highest logit of a row, and the first column that has it; NaN is none."""
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    column_of_highest = tl.zeros([BLOCK], tl.int32) + lanes
    for start in range(0, count, BLOCK):
        offsets = start + lanes
        value = tl.load(line + offsets, mask=offsets < count, other=float("-inf")).to(tl.float32)
        is_higher = value > highest
        highest = tl.where(is_higher, value, highest)
        column_of_highest = tl.where(is_higher, offsets, column_of_highest)
    best = tl.max(highest, 0)
    is_best = (highest == best) & (column_of_highest < count)
    first = tl.min(tl.where(is_best, column_of_highest, count), 0)
    # Without any number, the first column stands for all.
    return best, tl.where(first < count, first, 0)


@triton.jit
def _keys(values, columns):
    """Return int64 numbers in the order of values, and among equal ones of columns from behind."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit
def _of_key(key):
    """Return the value and the column of a number of :func:`_keys`."""
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
