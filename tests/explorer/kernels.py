"""Kernels with and without mistakes, as small as possible."""

import triton
import triton.language as tl

import interlace.language as il


@triton.jit
def send(
    data,
    signals,
    value,
    epoch,
    ctx,
    ORDER: tl.constexpr,
    FENCED: tl.constexpr,
    SIGNAL_FIRST: tl.constexpr,
):
    """Rank 0 puts four numbers in rank 1's memory and signals."""
    group = il.join(ctx)
    four = tl.arange(0, 4)
    target, flag = il.pointer(data, tl.float32) + four, il.pointer(signals, tl.int32)
    if il.rank(group) == 0:
        if SIGNAL_FIRST:
            il.signal(flag, epoch, 1, group, ORDER=ORDER)
        il.put(target, value + four.to(tl.float32), 1, group)
        if FENCED:
            il.fence(group)
        if not SIGNAL_FIRST:
            il.signal(flag, epoch, 1, group, ORDER=ORDER)


@triton.jit
def receive(data, signals, y, epoch, ctx):
    """Rank 1 waits for rank 0's signal, and copies the received numbers."""
    group = il.join(ctx)
    single = tl.arange(0, 1)
    if il.rank(group) == 1:
        il.wait(il.pointer(signals, tl.int32) + single, epoch, single, 0, group, single == 0)
        four = tl.arange(0, 4)
        tl.store(y + four, il.get(il.pointer(data, tl.float32) + four, 1, group))


@triton.jit
def acknowledge(signals, epoch, ctx):
    """Rank 1 tells rank 0 that it has copied; rank 0 waits for that."""
    group = il.join(ctx)
    single = tl.arange(0, 1)
    flag = il.pointer(signals, tl.int32) + 1
    if il.rank(group) == 1:
        il.signal(flag, epoch, 0, group)
    else:
        il.wait(flag + single, epoch, single + 1, 0, group, single == 0)


@triton.jit
def wait_for_each_other(signals, ctx):
    """Each rank waits for the other one before it signals."""
    group = il.join(ctx)
    me = il.rank(group)
    single = tl.arange(0, 1)
    flag = il.pointer(signals, tl.int32)
    il.wait(flag + single, 1, 1 - me + single, 0, group, single == 0)
    il.signal(flag, 1, 1 - me, group)


@triton.jit
def swap_without_waiting(data, signals, y, ctx):
    """Each rank signals, puts ones in the other's memory, signals, and copies its own at once."""
    group = il.join(ctx)
    me = il.rank(group)
    four = tl.arange(0, 4)
    inbox = il.pointer(data, tl.float32) + four
    flags = il.pointer(signals, tl.int32)
    il.signal(flags, 1, 1 - me, group)  # a step of a schedule before the put
    il.put(inbox, four * 0.0 + 1.0, 1 - me, group)
    il.signal(flags + 1, 1, 1 - me, group)
    tl.store(y + four, il.get(inbox, me, group))


@triton.jit
def put_to_last(data, ctx, WORLD_SIZE: tl.constexpr):
    """Every rank puts its number in the same word of the last one's memory."""
    group = il.join(ctx)
    il.put(il.pointer(data, tl.float32), il.rank(group).to(tl.float32), WORLD_SIZE - 1, group)


@triton.jit
def put_halves(data, y, signals, ctx):
    """Rank 0 puts eight numbers of two bytes; rank 1 copies them."""
    group = il.join(ctx)
    eight, single = tl.arange(0, 8), tl.arange(0, 1)
    pointers, flag = il.pointer(data, tl.float16) + eight, il.pointer(signals, tl.int32)
    if il.rank(group) == 0:
        il.put_signal(pointers, eight.to(tl.float16), flag, 1, 1, group)
    else:
        il.wait(flag + single, 1, single, 0, group, single == 0)
        tl.store(y + eight, il.get(pointers, 1, group))


@triton.jit
def put_words(words, value, epoch, ctx):
    """Rank 0 puts four packed words in rank 1's memory."""
    group = il.join(ctx)
    four = tl.arange(0, 4)[None, :]
    if il.rank(group) == 0:
        il.put_packed(
            il.pointer(words, tl.int64) + four, value + four.to(tl.float32), epoch, 1, group
        )


@triton.jit
def get_words(words, y, epoch, ctx):
    """Rank 1 waits for the packed words, and copies them."""
    group = il.join(ctx)
    four = tl.arange(0, 4)[None, :]
    if il.rank(group) == 1:
        tl.store(
            y + four,
            il.get_packed(il.pointer(words, tl.int64) + four, epoch, 0 * four, 0, group, four >= 0),
        )


@triton.jit
def add_to_first(counts, signals, y, ctx, WORLD_SIZE: tl.constexpr, WAITS: tl.constexpr):
    """Every rank adds 1 to one count of rank 0 by four elements of a tile; rank 0 stores the sum.

    ``WAITS`` leaves out the barrier between the sums and the load.
    """
    group = il.join(ctx)
    count = il.peer_pointer(il.pointer(counts, tl.int32) + tl.arange(0, 4) * 0, 0, group)
    tl.atomic_add(count, 1, sem="relaxed", scope="sys")
    if WAITS:
        il.barrier(il.pointer(signals, tl.int32), 1, group, WORLD_SIZE)
    if il.rank(group) == 0:
        tl.store(y, il.get(il.pointer(counts, tl.int32), 0, group))


@triton.jit
def look_for_ever(signals, ctx):
    """Look at a signal in a loop that is no wait."""
    group = il.join(ctx)
    while il.get(il.pointer(signals, tl.int32), il.rank(group), group) == 0:
        pass
