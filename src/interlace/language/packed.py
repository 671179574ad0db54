"""Packed words: values and their epoch in one 8-byte store, which needs neither signal nor fence.

An aligned 8-byte store arrives whole. A word that carries the awaited epoch therefore proves that
its values have arrived, and words need no order among themselves or with anything else::

    one value    bits 63 to 32: float32            bits 31 to 0: stamp (epoch and mark)
    two values   bits 63 to 44 and 43 to 24: floats of 20 bits      bits 23 to 0: epoch
"""

import triton
import triton.language as tl

from interlace.language._instructions import num_threads, records, require_memory
from interlace.language.addresses import peer_pointer, rank, require_pointer
from interlace.language.deadlines import (
    HIGHEST_INT32, LATE, NAMES_ITSELF, NO_RANK, after_look, report,
)
from interlace.language.epochs import EPOCH_MASK
from interlace.language.primitives import put
from interlace.language.recording import SEVERAL, UNPACKED, WAIT, append
from interlace.language.sizes import ceil_div
from interlace.language.tree import add_to_tree

_STAMP_MASK = tl.constexpr(0xFFFFFFFF)


@triton.jit
def put_packed(ptr, value, epoch, peer, group, mask=None, VALUES: tl.constexpr = 1):
    """Store float32 values with ``epoch`` as int64 words in ``peer``'s copy of ``ptr``.

    One value per word costs twice the bytes of a :func:`put`, and two values cost as many bytes;
    both save the signal's round trip.

    Args:
        ptr: Tile of int64 pointers (rank 0's copy).
        value: float32 tile of the shape of ``ptr``; with two values per word, ``[*shape, 2]``.
        epoch: int32 scalar: the stamp or the number that the peer waits for.
        peer: int32 scalar, or a tile that broadcasts with ``ptr``.
        group: The value of :func:`join`.
        mask: Words outside it are not stored.
        VALUES: 1: all 32 bits of the value and of the stamp. 2: each value rounded to 20 bits
            (sign, 8 of exponent, 11 of mantissa, so that values of float16 and bfloat16 are kept
            exactly), and 24 bits of the epoch, without its mark.
    """
    _require_words(ptr)
    tl.static_assert(
        value.dtype == tl.float32, "put_packed: values must be float32; convert them by .to"
    )
    if VALUES == 1:
        high = value.to(tl.int32, bitcast=True).to(tl.int64) << 32
        word = high | (epoch.to(tl.int64) & _STAMP_MASK)
    else:
        tl.static_assert(VALUES == 2, "put_packed: a word holds one value or two")
        first, second = tl.split(_round_to_20_bits(value))
        pair = (first.to(tl.int64) << 32) | ((second.to(tl.int64) & _STAMP_MASK) << 12)
        word = pair | (epoch.to(tl.int64) & EPOCH_MASK)
    put(ptr, word, peer, group, mask)


@triton.jit
def _require_words(ptr):
    """Refuse pointers to another type: a packed word is an int64."""
    require_pointer(ptr)
    tl.static_assert(
        ptr.dtype.element_ty == tl.int64,
        "packed words: ptr must point to int64 words; see il.pointer",
    )


@triton.jit
def _round_to_20_bits(value):
    """Return the bits (int32) of float32 values, rounded so that the low 12 are zero.

    To nearest, ties to even. A NaN stays a NaN.
    """
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FF + ((bits >> 12) & 1)) & -0x1000
    # Rounding could carry a NaN's mantissa into an infinity, so every NaN becomes the quiet one.
    return tl.where(value != value, 0x7FC00000, rounded)


@triton.jit
def _unpack(word, VALUES: tl.constexpr):
    """Take the float32 values out of int64 words; two per word get a last dimension of their own.
    """
    first = (word >> 32).to(tl.int32)
    if VALUES == 1:
        return first.to(tl.float32, bitcast=True)
    else:
        second = (word >> 12).to(tl.int32)
        return (tl.join(first, second) & -0x1000).to(tl.float32, bitcast=True)


@triton.jit
def carries(word, epoch, VALUES: tl.constexpr):
    """Tell if a packed word is of ``epoch`` (bool tile).

    Words of two values carry no mark, so only the number counts for them.
    """
    tag = _tag(word, VALUES)
    return (tag == epoch) if VALUES == 1 else (tag == (epoch & EPOCH_MASK))


@triton.jit
def _tag(word, VALUES: tl.constexpr):
    """Take the stamp (int32) out of a packed word; the epoch alone if it holds two values."""
    return word.to(tl.int32) if VALUES == 1 else word.to(tl.int32) & EPOCH_MASK


@triton.jit
def get_packed(ptr, epoch, peer, slice, group, mask=None, VALUES: tl.constexpr = 1):
    """Wait for a tile of packed words, and unpack it.

    Args:
        ptr: 2-D tile of int64 pointers to the words on this rank (rank 0's copy, as always).
        epoch: int32 scalar: the stamp or the number that is awaited.
        peer: int32 scalar, or a tile that broadcasts with ``ptr``: the ranks that put the words,
            for the error.
        slice: int32 scalar: number of the awaited slice, for the error.
        group: The value of :func:`join`.
        mask: Tile of the shape of ``ptr``; words outside it are not awaited and count as zero.
            None: all of them.
        VALUES: Number of values per word, as they were put.

    Returns:
        The values: a float32 tile of the shape of ``ptr``, or ``[*shape, 2]``. NaN after the
        deadline, or once the group is broken.
    """
    _require_tile_of_words(ptr)
    source = peer + tl.zeros(ptr.shape, tl.int32)
    selected = tl.full(ptr.shape, 1, tl.int1) if mask is None else mask
    return sum_words(ptr, None, 0, source, epoch, slice, group, selected, 1, VALUES)


@triton.jit
def sum_packed(
    ptr, own, stride, epoch, slice, group, mask, WORLD_SIZE: tl.constexpr,
    VALUES: tl.constexpr = 1, TREE: tl.constexpr = None,
):
    """Wait for one tile of packed words from every rank and add them: float32, in rank order.

    Args:
        ptr: 2-D tile of int64 pointers to rank 0's words on this rank; rank s's words are at ``ptr
            + s * stride``.
        own: float32 tile: this rank's part, kept in registers; or None if this rank has put its
            part as its peers have.
        stride: Number of words between two ranks' tiles.
        epoch: int32 scalar: the stamp or the number that is awaited.
        slice: int32 scalar: number of the awaited slice, for the error.
        group: The value of :func:`join`.
        mask: Tile of the shape of ``ptr``; words outside it are not awaited and count as zero.
            None: all of them.
        WORLD_SIZE: Number of ranks.
        VALUES: Number of values per word, as they were put. With two, ``own`` and the result are
            ``[*shape, 2]``.
        TREE: If ranks are added in a tree of pairs, the dtype to which sums are rounded before they
            are added; see ``tree.py``. None: in rank order.

    Returns:
        The sum (float32 tile); NaN after the deadline, or once the group is broken.
    """
    _require_tile_of_words(ptr)
    first = tl.zeros(ptr.shape, tl.int32)
    selected = tl.full(ptr.shape, 1, tl.int1) if mask is None else mask
    return sum_words(
        ptr, own, stride, first, epoch, slice, group, selected, WORLD_SIZE, VALUES, TREE
    )


@triton.jit
def _require_tile_of_words(ptr):
    """Refuse what is no 2-D tile of pointers to packed words."""
    _require_words(ptr)
    tl.static_assert(
        len(ptr.shape) == 2,
        "get_packed, sum_packed: ptr must be a 2-D tile of words; of a 1-D tile, ptr[:, None]",
    )


@triton.jit
def sum_words(
    ptr, kept, stride, first, epoch, slice, group, mask,
    SOURCES: tl.constexpr, VALUES: tl.constexpr, TREE: tl.constexpr = None,
):
    """Add, over s, the values of the words at ``ptr + s * stride``, which rank ``first + s`` puts.

    Args:
        ptr, stride, epoch, slice, group, mask, VALUES, TREE: As :func:`sum_packed` takes them.
        kept: This rank's part as a float32 tile, or None if it is among the words.
        first: int32 tile of the shape of ``ptr``: the rank that puts the first word.
        SOURCES: Number of words per sum.
    """
    # A tile that is smaller than the program is held several times over, each copy loaded by
    # another thread. While words arrive, the copies differ, and threads that judge by their own
    # copy would take different branches. So copies get a dimension of their own: the sum that
    # decides is over all of them, and every thread has the same answer.
    COPIES: tl.constexpr = ceil_div(num_threads(), ptr.shape[0] * ptr.shape[1])
    copies = tl.arange(0, COPIES)[None, None, :]
    copy = tl.zeros([ptr.shape[0], ptr.shape[1], COPIES], tl.int32) + copies
    words = peer_pointer(ptr, rank(group), group)[:, :, None] + copy * 0
    # A tile, because the interpreter turns a scalar condition into integers when it meets a mask.
    me = rank(group) + copy * 0
    unmasked = mask[:, :, None] & (copy >= 0)
    if kept is not None and VALUES == 2:
        # The peers get this part rounded. Adding it rounded here, too, makes all sums equal.
        kept = _round_to_20_bits(kept).to(tl.float32, bitcast=True)
    # Not ``source``, which Triton 3.6 does not let a branch below define anew.
    for part in tl.static_range(SOURCES):
        checked = unmasked if kept is None else unmasked & (me != part)
        place = words + part * stride
        require_memory("get_packed, sum_packed", place, rank(group), checked, group)
    if records(group):
        append(tl.zeros([], tl.int32), WAIT, SEVERAL, slice, group)
    looks = 0
    absent_count = 1
    expired = 0
    start = tl.zeros([], tl.int64)
    total = _unpack(tl.zeros(copy.shape, tl.int64), VALUES)
    while absent_count > 0:
        # The words of all ranks are loaded before the first is looked at, so that a look takes one
        # trip to memory rather than one per rank.
        total = _unpack(tl.zeros(copy.shape, tl.int64), VALUES)
        absent = tl.zeros(copy.shape, tl.int32)
        if TREE is not None:
            ones = total.to(TREE)
            twos, fours = ones, ones
        for source in tl.static_range(SOURCES):
            awaited = unmasked if kept is None else unmasked & (me != source)
            word = tl.load(words + source * stride, mask=awaited, other=0, volatile=True)
            has_arrived = carries(word, epoch, VALUES)
            absent += (awaited & (has_arrived == 0)).to(tl.int32)
            value = _unpack(tl.where(has_arrived, word, 0), VALUES)
            if kept is not None:
                if VALUES == 1:
                    value = tl.where(me == source, kept[:, :, None], value)
                else:
                    value = tl.where((me == source)[:, :, :, None], kept[:, :, None, :], value)
            if TREE is None:
                total += value
            else:
                total, ones, twos, fours = add_to_tree(
                    value, ones, twos, fours, source, SOURCES, TREE
                )
        absent_count = tl.sum(tl.ravel(absent))
        absent_count, looks, start, expired = after_look(absent_count, looks, start, expired, group)
    if expired > 0:
        sources = first[:, :, None] + copy * 0
        _report_absent_words(
            words, kept, stride, sources, epoch, slice, group, unmasked, SOURCES, VALUES
        )
    # Every variable that the loop carries is used here, because Triton 3.6 fails to compile a loop
    # that carries a tile while another of its results is dropped.
    complete = (expired == 0) & (absent_count == 0) & (looks > 0) & (start >= 0)
    total = tl.where(complete, total, float("nan"))
    if records(group):
        append(tl.zeros([], tl.int32), UNPACKED, SEVERAL, slice, group)
    first_copy = copy == 0 if VALUES == 1 else (copy == 0)[:, :, :, None]
    return tl.sum(tl.where(first_copy, total, 0.0), 2)


@triton.jit
def _report_absent_words(
    words, kept, stride, first, epoch, slice, group, mask,
    SOURCES: tl.constexpr, VALUES: tl.constexpr,
):
    """Record for the host the lowest rank whose words are absent, and the stamp seen instead.

    Args:
        words: 3-D tile of int64 pointers: the words of the first source, with a dimension of
            copies.
        kept, stride, epoch, slice, group, SOURCES, VALUES: As :func:`sum_words` takes them.
        first: int32 tile of the shape of ``words``: the rank that puts the first word.
        mask: Tile of the shape of ``words``; words outside it are not awaited.
    """
    late = NO_RANK
    seen = 0
    for step in tl.static_range(SOURCES):
        source = SOURCES - 1 - step
        names_all = kept is None and NAMES_ITSELF
        awaited = mask if names_all else mask & (first + source != rank(group))
        word = tl.load(words + source * stride, mask=awaited, other=0, volatile=True)
        absent = awaited & (carries(word, epoch, VALUES) == 0)
        peer = tl.min(tl.ravel(tl.where(absent, first + source, NO_RANK)))
        if peer < late:
            late = peer
            of_peer = absent & (first + source == peer)
            seen = tl.min(tl.ravel(tl.where(of_peer, _tag(word, VALUES), HIGHEST_INT32)))
    # No word is absent any more if the last ones came after the deadline was checked.
    if late < NO_RANK:
        report(group, late, slice, epoch, seen, LATE)
