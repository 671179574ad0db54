"""The symmetric memory of a call: words that say which call it is, numbers, and slots for values.

Each half has ``HEADER_WORDS`` packed words: 16 that say which call this is, by rank, and behind
them the numbers that programs tell each other. They keep what they held, as words carry stamps. The
slots behind them are zero between calls, whatever the calls' sizes are, so nothing else may ever
lie there.
"""

import triton
import triton.language as tl

import interlace.language as il

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
