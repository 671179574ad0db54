"""Small kernels over ``interlace.language``; imported by ranks only, where the interpreter is on."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.language import primitives


@triton.jit
def who_am_i(out, ctx):
    group = il.join(ctx)
    tl.store(out, il.rank(group))
    tl.store(out + 1, il.world_size(group))


@triton.jit
def put_signal_ring(data, signals, out, ctx, epoch, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Each rank puts ``100 * rank + i`` at its right neighbour, and waits for its left one's."""
    group = il.join(ctx)
    me = il.rank(group)
    i = tl.arange(0, BLOCK)
    target = il.pointer(data, tl.float32) + i
    flag = il.pointer(signals, tl.int32)
    il.put_signal(target, (100 * me + i).to(tl.float32), flag, epoch, (me + 1) % WORLD_SIZE, group)
    left = tl.zeros([1], tl.int32) + (me + WORLD_SIZE - 1) % WORLD_SIZE
    arrived = il.wait(
        flag + tl.zeros([1], tl.int32), epoch, left, 7, group, tl.full([1], 1, tl.int1)
    )
    tl.store(out + i, tl.where(arrived, il.get(target, me, group), -1.0))


@triton.jit
def masked_put(data, ctx, peer, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Only the first ``COUNT`` elements."""
    i = tl.arange(0, BLOCK)
    il.put(il.pointer(data, tl.float32) + i, i.to(tl.float32) + 1, peer, il.join(ctx), i < COUNT)


@triton.jit
def scatter(data, ctx, WORLD_SIZE: tl.constexpr):
    """Element i goes to rank i: one put whose peer is a tile."""
    group = il.join(ctx)
    i = tl.arange(0, WORLD_SIZE)
    il.put(
        il.pointer(data, tl.float32) + il.rank(group) + i * 0,
        (10 * il.rank(group) + i).to(tl.float32),
        i,
        group,
    )


@triton.jit
def gather_by_get(data, signals, out, ctx, epoch, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Each rank writes its own copy, all meet, and each reads everyone's."""
    group = il.join(ctx)
    me = il.rank(group)
    i = tl.arange(0, BLOCK)
    own = il.pointer(data, tl.float32) + i
    il.put(own, (100 * me + i + epoch).to(tl.float32), me, group)
    arrived = il.barrier(il.pointer(signals, tl.int32), epoch, group, WORLD_SIZE)
    for peer in range(WORLD_SIZE):
        tl.store(out + peer * BLOCK + i, tl.where(arrived, il.get(own, peer, group), -1.0))


@triton.jit
def sum_words(
    words, out, ctx, epoch, WORLD_SIZE: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum over ranks of ``rank + 1 + i``, by packed words; its own part put like the others',
    or kept.
    """
    group = il.join(ctx)
    me = il.rank(group)
    place = tl.arange(0, BLOCK)[:, None] + tl.arange(0, 1)[None, :]
    part = (me + 1 + place).to(tl.float32)
    slots = il.pointer(words, tl.int64)
    for peer in range(WORLD_SIZE):
        il.put_packed(slots + me * BLOCK + place, part, epoch, peer, group)
    total = il.sum_packed(
        slots + place, part if KEEP else None, BLOCK, epoch, 0, group, place >= 0, WORLD_SIZE
    )
    tl.store(out + place, total)


@triton.jit
def sum_pairs(
    words,
    values,
    out,
    ctx,
    epoch,
    WORLD_SIZE: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum over ranks of ``values [BLOCK, 2]``, two to a word; and the right neighbour's words
    by themselves.
    """
    group = il.join(ctx)
    me = il.rank(group)
    place = tl.arange(0, BLOCK)[:, None] + tl.arange(0, 1)[None, :]
    both = place[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    part = tl.load(values + both)
    slots = il.pointer(words, tl.int64)
    for peer in range(WORLD_SIZE):
        il.put_packed(slots + me * BLOCK + place, part, epoch, peer, group, VALUES=2)
    own = part if KEEP else None
    total = il.sum_packed(
        slots + place, own, BLOCK, epoch, 0, group, place >= 0, WORLD_SIZE, VALUES=2
    )
    tl.store(out + both, total)
    right = (me + 1) % WORLD_SIZE
    alone = il.get_packed(
        slots + right * BLOCK + place, epoch, right, 0, group, place >= 0, VALUES=2
    )
    tl.store(out + 2 * BLOCK + both, alone)


@triton.jit
def four_puts_and_a_signal(
    data,
    signals,
    acknowledgements,
    out,
    ctx,
    epoch,
    ORDER: tl.constexpr,
    FENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rank 0 puts four tiles of ``epoch`` and signals; rank 1 reads once the signal is there, and
    answers.
    """
    group = il.join(ctx)
    i = tl.arange(0, BLOCK)
    target = il.pointer(data, tl.int32) + i
    flag = il.pointer(signals, tl.int32) + tl.zeros([1], tl.int32)
    answer = il.pointer(acknowledgements, tl.int32) + tl.zeros([1], tl.int32)
    one = tl.full([1], 1, tl.int1)
    if il.rank(group) == 0:
        for part in range(4):
            il.put(target + part * BLOCK, i * 0 + epoch, 1, group)
        if FENCE:
            il.fence(group)
        il.signal(flag, epoch, 1, group, ORDER=ORDER)
        il.wait(answer, epoch, tl.zeros([1], tl.int32) + 1, 0, group, one)
    else:
        il.wait(flag, epoch, tl.zeros([1], tl.int32), 0, group, one)
        for part in range(4):
            tl.store(out + part * BLOCK + i, il.get(target + part * BLOCK, 1, group))
        il.signal(answer, epoch, 0, group)


@triton.jit
def next_of_every_program(epochs, out, before):
    epoch = il.next_epoch(epochs)
    tl.store(out + tl.program_id(0), epoch)
    tl.store(before + tl.program_id(0), il.previous_epoch(epoch))
    il.advance_epoch(epochs, epoch)


@triton.jit
def compare_signals(seen, awaited, behind, BLOCK: tl.constexpr):
    """Whether each of the signals ``seen`` is behind the one that is awaited."""
    i = tl.arange(0, BLOCK)
    tl.store(
        behind + i, primitives.is_behind(tl.load(seen + i), tl.load(awaited + i)).to(tl.int32)
    )


@triton.jit
def clear_signals(signals, epochs, ctx, count, DTYPE: tl.constexpr):
    epoch = il.next_epoch(epochs)
    il.clear_old(il.pointer(signals, DTYPE), count, epoch, il.join(ctx))
    il.advance_epoch(epochs, epoch)
