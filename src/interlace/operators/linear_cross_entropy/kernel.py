"""Kernels that take rows of logits, whose columns are shared out over ranks, to their losses and
their gradients.
"""

import triton
import triton.language as tl

import interlace.language as il
from interlace.language.sizes import next_power_of_2

_NUMBERS = tl.constexpr(4)
"""Numbers that a rank tells of a row: the highest logit, the sum of exponentials, the target's
logit, the sum of all logits.
"""

_LOGITS_AT_A_TIME = tl.constexpr(4)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["words", "call", "half", "rows", "first", "ignored"])
def losses_of_rows(
    logits, targets, losses, log_sums, scale, words, epochs, ctx, call, half, rows, columns, stride,
    first, vocabulary, ignored, smoothing, z_loss,
    WORLD_SIZE: tl.constexpr, SMOOTHS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute the loss of each row from this rank's columns of its logits and what the peers say of
    theirs; with ``GRADIENT`` overwrite the logits with their gradient, times ``scale[0]``.

    This rank has ``columns`` of the vocabulary's, from ``first`` on; rows of ``logits`` are
    ``stride`` apart, and columns behind the rank's own get a gradient of 0.

    **Protocol.** Program p has rows p, p + programs, ... Of a row it tells every rank, itself
    included, four numbers in packed words, ``[half][row][source][number]``, and then waits for
    those of all ranks, which it combines in rank order. Words carry the call's stamp, and the
    halves take turns. A half is written again two calls later: by then its reader has sent its
    numbers of the call in between, after it had read the half. A program waits for programs of its
    own index alone, after it has put what they wait for.

    **Example.** Two ranks, logits ``[0, ln 3]`` and ``[ln 2, 0]``, target 1: the ranks tell
    ``(ln 3, 4/3, ln 3, ln 3)`` and ``(ln 2, 3/2, 0, ln 2)``. Both store the logarithm of the sum
    ``ln 7`` and the loss ``ln 7/3``; the gradients are ``[1/7, -4/7]`` and ``[2/7, 1/7]``.
    """
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    sources = tl.arange(0, next_power_of_2(WORLD_SIZE))[:, None]
    numbers = tl.arange(0, _NUMBERS)[None, :]
    slots = il.pointer(words, tl.int64) + (epoch & 1).to(tl.int64) * half + numbers
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        il.record("tile", row, group)
        line = logits + _start_of(row, stride)
        target = tl.load(targets + row).to(tl.int64)
        highest, total, plain = _sums_of(line, columns, SMOOTHS, BLOCK)
        own_target = target - first
        is_here = (own_target >= 0) & (own_target < columns)
        chosen = tl.load(line + own_target, mask=is_here, other=0.0).to(tl.float32)
        if WORLD_SIZE > 1:
            told = tl.where(numbers == 0, highest, tl.where(numbers == 1, total, 0.0))
            told = tl.where(numbers == 2, chosen, tl.where(numbers == 3, plain, told))
            places = slots + row * (WORLD_SIZE * _NUMBERS)
            is_rank = (sources < WORLD_SIZE) & (numbers >= 0)
            # A tile of peers, so that all of them are told at once.
            values = told + tl.zeros([sources.shape[0], _NUMBERS], tl.float32)
            il.put_packed(
                places + me * _NUMBERS + sources * 0, values, stamp, sources + numbers * 0, group,
                is_rank,
            )
            heard = il.get_packed(
                places + sources * _NUMBERS, stamp, sources + numbers * 0, row, group, is_rank
            )
            absent = float("-inf")
            their_highest = tl.max(tl.where(is_rank & (numbers == 0), heard, absent), 1)
            their_total = tl.sum(tl.where(numbers == 1, heard, 0.0), 1)
            highest = tl.max(their_highest, 0)
            total = tl.sum(their_total * tl.exp(their_highest - _finite(highest)), 0)
            chosen = tl.sum(tl.sum(tl.where(numbers == 2, heard, 0.0), 1), 0)
            plain = tl.sum(tl.sum(tl.where(numbers == 3, heard, 0.0), 1), 0)
        log_sum = highest + tl.log(total)
        loss = log_sum - (1 - smoothing) * chosen - smoothing / vocabulary * plain
        loss += z_loss * log_sum * log_sum
        # A target that is none of the vocabulary's makes NaN, as nothing here can raise.
        is_counted = target != ignored
        loss = tl.where((target >= 0) & (target < vocabulary), loss, float("nan"))
        tl.store(losses + row, tl.where(is_counted, loss, 0.0))
        tl.store(log_sums + row, log_sum)
        if GRADIENT:
            factor = tl.load(scale) + loss * 0
            _store_gradient(
                line, log_sum, own_target, factor, is_counted, columns, stride, vocabulary, smoothing,
                z_loss, BLOCK,
            )
    il.clear_old(il.pointer(words, tl.int64), 2 * half, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["rows", "first", "ignored"])
def gradients_of_rows(
    logits, targets, log_sums, scales, rows, columns, stride, first, vocabulary, ignored, smoothing,
    z_loss, BLOCK: tl.constexpr,
):
    """Overwrite the logits of each row with their gradient, times the row's scale, where the
    logarithm of the sum over all ranks is known. Nothing communicates.
    """
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        target = tl.load(targets + row).to(tl.int64)
        is_column = (target >= 0) & (target < vocabulary)
        scale = tl.where(is_column, tl.load(scales + row), float("nan"))
        _store_gradient(
            logits + _start_of(row, stride), tl.load(log_sums + row), target - first, scale,
            target != ignored, columns, stride, vocabulary, smoothing, z_loss, BLOCK,
        )


@triton.jit
def _start_of(row, stride):
    """Return the offset of a row's first element (int64): a product of 32 bits would overflow."""
    # Triton makes an argument of 1 a constant, which has no dtype.
    return (tl.zeros([], tl.int64) + stride) * row


@triton.jit
def _finite(highest):
    """Return what exponents are taken relative to: 0 where there is no logit, as -inf less -inf is
    no number.
    """
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _sums_of(line, columns, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row's highest logit, the sum of exponentials relative to it, and, with ``SMOOTHS``,
    the sum of the logits (float32 scalars).
    """
    # A lane has several logits at a time, so that sums are seldom made relative to another highest
    # one: exponentials are what bounds this pass.
    lanes = tl.arange(0, BLOCK)
    places = (tl.arange(0, _LOGITS_AT_A_TIME) * BLOCK)[:, None] + lanes[None, :]
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, _LOGITS_AT_A_TIME * BLOCK):
        inside = start + places < columns
        value = tl.load(line + start + places, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(value, 0))
        base = _finite(higher)
        exponentials = tl.exp2((value - base[None, :]) * _LOG2_E)
        total = total * tl.exp2((highest - base) * _LOG2_E) + tl.sum(exponentials, 0)
        highest = higher
        if SMOOTHS:
            plain += tl.sum(tl.where(inside, value, 0.0), 0)
    highest_of_all = tl.max(highest, 0)
    base = _finite(highest_of_all)
    total_of_all = tl.sum(total * tl.exp2((highest - base) * _LOG2_E), 0)
    return highest_of_all, total_of_all, tl.sum(plain, 0)


@triton.jit
def _store_gradient(
    line, log_sum, own, scale, is_counted, columns, stride, vocabulary, smoothing, z_loss,
    BLOCK: tl.constexpr,
):
    """Overwrite a row's logits with their gradient: of column j ``scale * ((1 + 2 z lse) p[j] -
    smoothing / vocabulary - (1 - smoothing) * (j is the target))``, with ``p[j] = exp(logit[j] -
    lse)``; 0 in a row that does not count, and behind the columns.
    """
    lanes = tl.arange(0, BLOCK)
    slope = 1 + 2 * z_loss * log_sum
    for start in range(0, stride, BLOCK):
        places = start + lanes
        inside = places < columns
        value = tl.load(line + places, mask=inside, other=0.0).to(tl.float32)
        gradient = slope * tl.exp(value - log_sum) - smoothing / vocabulary
        gradient = scale * (gradient - tl.where(places == own, 1 - smoothing, 0.0))
        gradient = tl.where(inside & (is_counted | (lanes < 0)), gradient, 0.0)
        tl.store(line + places, gradient.to(line.dtype.element_ty), mask=places < stride)


@triton.jit
def multiply_unless_one(values, factor, count, BLOCK: tl.constexpr):
    """Multiply ``count`` values in place by ``factor[0]``; where that is 1, move nothing."""
    by = tl.load(factor).to(tl.float32)
    if by != 1:
        step = (tl.zeros([], tl.int64) + tl.num_programs(0)) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
            offsets = start + tl.arange(0, BLOCK)
            value = tl.load(values + offsets, mask=offsets < count, other=0.0).to(tl.float32)
            tl.store(values + offsets, (value * by).to(values.dtype.element_ty), offsets < count)
