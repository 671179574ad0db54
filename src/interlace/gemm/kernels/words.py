"""Packed words: how tiles travel between ranks, and how ranks agree on the call.

A word is 64 bits: one or two values of a tile and the stamp of the call. Where it has two values,
they are two tokens of a row; the pair is then the last dimension.
"""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.gemv import mask_of
from interlace.language.sizes import next_power_of_2


@triton.jit
def words_of(tile, rows, N, B, TILING: tl.constexpr):
    """Return the offsets of the words of a tile's ``rows`` among all of a rank's, and their mask.

    There is room for complete tiles, so the compiler knows the alignment of the words.
    """
    BLOCK_B: tl.constexpr = TILING.block_b
    VALUES: tl.constexpr = TILING.word_values
    token_tiles = (B + BLOCK_B - 1) // BLOCK_B
    columns = tile % token_tiles * (BLOCK_B // VALUES) + tl.arange(0, BLOCK_B // VALUES)
    offsets = rows[:, None].to(tl.int64) * (token_tiles * BLOCK_B // VALUES) + columns[None, :]
    return offsets, mask_of(rows, columns * VALUES, N, B, TILING)


@triton.jit
def in_words(part, VALUES: tl.constexpr):
    """Group the values of a tile by word: ``[rows, tokens]``, or ``[rows, tokens / 2, 2]``."""
    return part if VALUES == 1 else part.reshape([part.shape[0], part.shape[1] // 2, 2])


@triton.jit
def out_of_words(values, VALUES: tl.constexpr):
    """Undo :func:`in_words`: ``[rows, tokens]``."""
    return values if VALUES == 1 else values.reshape([values.shape[0], values.shape[1] * 2])


@triton.jit
def announce(calls, stamp, group, WORLD_SIZE: tl.constexpr):
    """Tell all peers the stamp of this call.

    Words of two values carry the epoch without the call's mark; this word carries both.
    """
    peers = tl.arange(0, next_power_of_2(WORLD_SIZE))[None, :]
    zeros = tl.zeros(peers.shape, tl.float32)
    words = calls + il.rank(group) + peers * 0
    il.put_packed(words, zeros, stamp, peers, group, peers < WORLD_SIZE)


@triton.jit
def agree(calls, stamp, group, WORLD_SIZE: tl.constexpr):
    """Return 1 if all peers are in this call, else 0.

    The words of :func:`announce` say so. It must follow this program's own puts, as it waits.
    """
    peers = tl.arange(0, next_power_of_2(WORLD_SIZE))[None, :]
    words = il.get_packed(calls + peers, stamp, peers, 0, group, peers < WORLD_SIZE)
    # A word that did not arrive in time is NaN, and so is the sum then.
    return (tl.sum(tl.ravel(words)) == 0).to(tl.int32)


@triton.jit
def end_call(result, words, half, epochs, epoch, agreed, group):
    """Make y NaN if the ranks did not agree, clear old words, and count the call."""
    # Without agreement, the words that arrived may belong to other calls.
    if agreed == 0:
        il.fill_nan(result.y, (tl.zeros([], tl.int64) + result.B) * result.N)
    il.clear_old(il.pointer(words, tl.int64), 2 * half, epoch, group)
    il.advance_epoch(epochs, epoch)
