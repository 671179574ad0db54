"""Values that show by themselves that they have arrived: their symmetric memory, and the kernel
that sums them over ranks.

The memory of a call has words that say which call it is, numbers, and slots for values. Each half
has ``HEADER_WORDS`` packed words: 16 that say which call this is, by rank, and behind them the
numbers that programs tell each other. They keep what they held, as words carry stamps. The slots
behind them are zero between calls, whatever the calls' sizes are, so nothing else may ever lie
there.
"""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.words import agree, announce

HEADER_WORDS = 16 + 3 * 1024
"""Packed words in front of the slots: room for 3 numbers of 1024 receiving programs."""

_HEADER_WORDS = tl.constexpr(HEADER_WORDS)


@triton.jit
def memory_of(words, half, epoch, dtype: tl.constexpr):
    """Return pointers to the packed words of a call, and to its slots, which hold ``dtype``.

    Args:
        words: Rank 0's address of the first half (int64 scalar).
        half: 8-byte words of a half.
    """
    # The two halves take turns, so that a peer may still read what the last call has sent.
    calls = il.pointer(words, tl.int64) + tl.multiple_of((epoch & 1).to(tl.int64) * half, 16)
    return calls, (calls + _HEADER_WORDS).to(tl.pointer_type(dtype))


@triton.jit
def end_call(words, half, epochs, epoch, group):
    """Clear old packed words of both halves, and count the call."""
    # Slots need no clearing, as their readers have set them to zero. Only the packed words before
    # them keep the stamps of earlier calls.
    first = il.pointer(words, tl.int64)
    il.clear_old(first, _HEADER_WORDS, epoch, group)
    il.clear_old(first + half, _HEADER_WORDS, epoch, group)
    il.advance_epoch(epochs, epoch)


@triton.jit(do_not_specialize=["words", "call", "half"])
def sum_parts(
    part, bias, y, words, epochs, ctx, call, half, elements, N,
    WORLD_SIZE: tl.constexpr, SCATTER: tl.constexpr, FACTOR: tl.constexpr, CHUNK: tl.constexpr,
    IN_TREE: tl.constexpr,
):
    """Compute ``y = sum over ranks of part, + bias``: ``elements`` on each rank.

    Every rank sums the same parts for itself; with ``SCATTER``, ``part`` has ``elements`` for each
    rank, in the order of ranks. Ranks' parts are added in rank order, or with ``IN_TREE`` in a tree
    of pairs (``interlace.language.tree``).

    **Protocol.** Program p has chunks p, p + programs, ... of the flat part. It puts them into the
    slot of this rank on every peer, all of them first, and then adds what the peers have put into
    its own slots. Values show by themselves that they have arrived
    (:func:`il.sum_lamport`); the two halves of the slots take turns. A half is written again two
    calls later: by then its reader has sent the values of the call in between, which it did after
    it had read and freed the half. Values carry no mark, so one more program waits for a word of
    every rank that does, and makes y NaN if the ranks are in different calls.

    **Example.** Two ranks, parts ``[1, 2]`` and ``[10, 20]``: both store ``[11, 22]``.
    """
    program, programs = tl.program_id(0), tl.num_programs(0) - 1
    elements, N = il.multiple_of(elements, FACTOR), il.multiple_of(N, FACTOR)
    TREE: tl.constexpr = part.dtype.element_ty if IN_TREE else None
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    calls, slots = memory_of(words, half, epoch, part.dtype.element_ty)
    # Triton makes an argument of 1 a constant, which has no dtype.
    count = tl.zeros([], tl.int64) + elements
    if program == programs:
        announce(calls, stamp, group, WORLD_SIZE)
        if agree(calls, stamp, group, WORLD_SIZE) == 0:
            il.fill_nan(y, count)
    else:
        size = (count + 15) // 16 * 16
        lanes = tl.arange(0, CHUNK)
        for chunk in range(program, (elements + CHUNK - 1) // CHUNK, programs):
            offsets = chunk * CHUNK + lanes
            inside = offsets < elements
            if not SCATTER:
                value = tl.load(part + offsets, mask=inside, other=0.0)
            # The next rank is the first to be sent to, so that ranks do not crowd one link.
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (me + step) % WORLD_SIZE
                if SCATTER:
                    value = tl.load(part + peer * count + offsets, mask=inside, other=0.0)
                il.put_lamport(slots + me * size + offsets, value, peer, group, inside)
        # All chunks have been sent before the first is awaited, so no two ranks wait for each
        # other.
        own_part = part + me * count if SCATTER else part
        for chunk in range(program, (elements + CHUNK - 1) // CHUNK, programs):
            offsets = chunk * CHUNK + lanes
            inside = offsets < elements
            own = tl.load(own_part + offsets, mask=inside, other=0.0).to(tl.float32)
            total = il.sum_lamport(
                slots + offsets, own, size, stamp, chunk, group, inside, WORLD_SIZE, TREE
            )
            if bias is not None:
                total += tl.load(bias + offsets % N, mask=inside, other=0.0).to(tl.float32)
            tl.store(y + offsets, total.to(y.dtype.element_ty), mask=inside)
    end_call(words, half, epochs, epoch, group)
