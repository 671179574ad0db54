"""Values that show by themselves that they have arrived, which needs neither signal nor stamp.

Memory that waits for values is zero, and no value is stored as zero: a value travels with its sign
bit flipped, so that zero would stand for -0.0, which is sent as 0.0. An aligned store of one
element arrives whole, so an element that is not zero has arrived. Whoever has read an element sets
it to zero again. This is the protocol of Lamport's queues, as collectives of inference engines use
it: as many bytes as a :func:`put`, and no round trip for a signal.

Elements carry neither epoch nor mark. So memory comes in two halves, which take turns by the
epoch's parity, a rank writes an element of a half only once in a call, and every rank must read,
in each call, all that it is sent.
"""

import triton
import triton.language as tl

from interlace.language._instructions import load_whole, num_threads, records, require_memory
from interlace.language.addresses import peer_pointer, rank
from interlace.language.deadlines import LATE, NAMES_ITSELF, NO_RANK, after_look, report
from interlace.language.primitives import put
from interlace.language.recording import SEVERAL, UNPACKED, WAIT, append
from interlace.language.tree import add_to_tree


@triton.jit
def put_lamport(ptr, value, peer, group, mask=None):
    """Store floating-point values in ``peer``'s copy of ``ptr``, where :func:`sum_lamport` awaits
    them.

    Args:
        ptr: Tile of pointers (rank 0's copy) to elements of 16 or 32 bits, which are zero.
        value: Tile of the shape of ``ptr``, converted to its dtype. -0.0 arrives as 0.0.
        peer: int32 scalar, or a tile that broadcasts with ``ptr``.
        group: The value of :func:`join`.
        mask: Elements outside it are not stored.
    """
    words = _as_integers(ptr)
    BITS: tl.constexpr = words.dtype.element_ty
    sign = _sign(value.shape, BITS)
    bits = value.to(ptr.dtype.element_ty).to(BITS, bitcast=True)
    put(words, tl.where(bits == sign, sign, bits ^ sign), peer, group, mask)


@triton.jit
def sum_lamport(
    ptr, own, stride, epoch, slice, group, mask, WORLD_SIZE: tl.constexpr,
    TREE: tl.constexpr = None,
):
    """Wait for one tile of values from every rank, add them in rank order, and free their memory.

    Args:
        ptr: Tile of pointers to rank 0's values on this rank, at least as many as the program has
            threads; rank s's values are at ``ptr + s * stride``.
        own: float32 tile: this rank's part, kept in registers; or None if this rank has put its
            part as its peers have.
        stride: Number of elements between two ranks' tiles.
        epoch: int32 scalar: the stamp of the call, for the error.
        slice: int32 scalar: number of the awaited slice, for the error.
        group: The value of :func:`join`.
        mask: Tile of the shape of ``ptr``; elements outside it are not awaited and count as zero.
            None: all of them.
        WORLD_SIZE: Number of ranks.
        TREE: If ranks are added in a tree of pairs, the dtype to which sums are rounded before they
            are added; see ``tree.py``. None: in rank order.

    Returns:
        The sum (float32 tile); NaN after the deadline, or once the group is broken.
    """
    selected = tl.full(ptr.shape, 1, tl.int1) if mask is None else mask
    return sum_values(ptr, own, stride, 0, epoch, slice, group, selected, WORLD_SIZE, TREE)


@triton.jit
def get_lamport(ptr, epoch, peer, slice, group, mask=None):
    """Wait for one tile of values that :func:`put_lamport` stores here, and free their memory.

    Args:
        ptr: Tile of pointers (rank 0's copy), at least as many as the program has threads.
        epoch: int32 scalar: the stamp of the call, for the error.
        peer: int32 scalar: the rank that puts them, for the error.
        slice: int32 scalar: number of the awaited slice, for the error.
        group: The value of :func:`join`.
        mask: Tile of the shape of ``ptr``; elements outside it are not awaited and are zero.

    Returns:
        The values (float32 tile); NaN after the deadline, or once the group is broken.
    """
    selected = tl.full(ptr.shape, 1, tl.int1) if mask is None else mask
    return sum_values(ptr, None, 0, peer, epoch, slice, group, selected, 1)


@triton.jit
def sum_values(
    ptr, own, stride, first, epoch, slice, group, mask, SOURCES: tl.constexpr,
    TREE: tl.constexpr = None,
):
    """Add, over s, the values at ``ptr + s * stride``, which rank ``first + s`` puts.

    Args:
        ptr, own, stride, epoch, slice, group, mask, TREE: As :func:`sum_lamport` takes them.
        first: int32 scalar: the rank that puts the first values; 0 if there is an ``own``.
        SOURCES: Number of values per sum.
    """
    # In a smaller tile several threads would load the same element, and could disagree about it.
    tl.static_assert(
        ptr.numel >= num_threads(),
        "sum_lamport, get_lamport: the tile must have an element for each thread",
    )
    FLOAT: tl.constexpr = ptr.dtype.element_ty
    words = _as_integers(peer_pointer(ptr, rank(group), group))
    sign = _sign(ptr.shape, words.dtype.element_ty)
    # A tile, because the interpreter turns a scalar condition into integers when it meets a mask.
    me = rank(group) + tl.zeros(ptr.shape, tl.int32)
    # Not ``source``, which Triton 3.6 does not let a branch below define anew.
    for part in tl.static_range(SOURCES):
        checked = mask if own is None else mask & (me != part)
        place = words + part * stride
        require_memory("get_lamport, sum_lamport", place, rank(group), checked, group)
    if records(group):
        append(tl.zeros([], tl.int32), WAIT, SEVERAL, slice, group)
    looks = 0
    absent_count = 1
    expired = 0
    start = tl.zeros([], tl.int64)
    total = tl.zeros(ptr.shape, tl.float32)
    while absent_count > 0:
        # The values of all ranks are loaded before the first is looked at, so that a look takes one
        # trip to memory rather than one per rank.
        total = tl.zeros(ptr.shape, tl.float32)
        absent = tl.zeros(ptr.shape, tl.int32)
        if TREE is not None:
            ones = tl.zeros(ptr.shape, TREE)
            twos, fours = ones, ones
        for source in tl.static_range(SOURCES):
            awaited = mask if own is None else mask & (me != source)
            word = load_whole(words + source * stride, awaited)
            absent += (awaited & (word == 0)).to(tl.int32)
            value = (word ^ sign).to(FLOAT, bitcast=True).to(tl.float32)
            value = tl.where(awaited, value, 0.0)
            if own is not None:
                value = tl.where(me == source, own, value)
            if TREE is None:
                total += value
            else:
                total, ones, twos, fours = add_to_tree(
                    value, ones, twos, fours, source, SOURCES, TREE
                )
        absent_count = tl.sum(tl.ravel(absent))
        absent_count, looks, start, expired = after_look(absent_count, looks, start, expired, group)
    if expired > 0:
        late = NO_RANK
        for step in tl.static_range(SOURCES):
            source = SOURCES - 1 - step
            names_all = own is None and NAMES_ITSELF
            awaited = mask if names_all else mask & (me != first + source)
            word = load_whole(words + source * stride, awaited)
            if tl.sum(tl.ravel((awaited & (word == 0)).to(tl.int32))) > 0:
                late = first + source
        if late < NO_RANK:
            report(group, late, slice, epoch, 0, LATE)
    for source in tl.static_range(SOURCES):
        awaited = mask if own is None else mask & (me != source)
        tl.store(words + source * stride, tl.zeros(ptr.shape, words.dtype.element_ty), mask=awaited)
    # Every variable that the loop carries is used here, because Triton 3.6 fails to compile a loop
    # that carries a tile while another of its results is dropped.
    complete = (expired == 0) & (absent_count == 0) & (looks > 0) & (start >= 0)
    total = tl.where(complete, total, float("nan"))
    if records(group):
        append(tl.zeros([], tl.int32), UNPACKED, SEVERAL, slice, group)
    return total


@triton.jit
def _as_integers(ptr):
    """Return pointers to the same memory as integers of the same size."""
    if ptr.dtype.element_ty.primitive_bitwidth == 16:
        return ptr.to(tl.pointer_type(tl.int16))
    else:
        tl.static_assert(
            ptr.dtype.element_ty.primitive_bitwidth == 32, "elements must have 16 or 32 bits"
        )
        return ptr.to(tl.pointer_type(tl.int32))


@triton.jit
def _sign(shape: tl.constexpr, BITS: tl.constexpr):
    """Return a tile of integers whose sign bit alone is set."""
    return tl.full(shape, -32768 if BITS.primitive_bitwidth == 16 else -2147483648, BITS)
