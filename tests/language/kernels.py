"""Small kernels over ``interlace.language``.

Only ranks import them, where the interpreter is on.
"""

import triton
import triton.language as tl

import interlace.language as il
from interlace.language import primitives
from interlace.language._instructions import load_whole
from interlace.language.deadlines import has_expired


@triton.jit
def look(data, out, ctx, COUNT: tl.constexpr):
    """Load one int16 of this rank's memory many times."""
    group = il.join(ctx)
    i = tl.arange(0, COUNT)
    number = il.peer_pointer(il.pointer(data, tl.int16), il.rank(group), group)
    tl.store(out + i, load_whole(number + i * 0, i >= 0))


@triton.jit
def expire(out, ctx, waited_ns):
    """Tell if a wait must end that began so long ago."""
    start = tl.max(il.clock_ns(tl.arange(0, 1)), 0) - waited_ns
    tl.store(out, has_expired(start, il.join(ctx)))


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
    """Put only the first ``COUNT`` elements."""
    i = tl.arange(0, BLOCK)
    il.put(il.pointer(data, tl.float32) + i, i.to(tl.float32) + 1, peer, il.join(ctx), i < COUNT)


@triton.jit
def use_peer(data, signals, ctx, first, COUNT: tl.constexpr, PRIMITIVE: tl.constexpr):
    """Use ranks ``first`` and ``first + 1`` as peers, of which the mask leaves ``COUNT``."""
    group = il.join(ctx)
    two = tl.arange(0, 2)
    target, flags = il.pointer(data, tl.float32) + two, il.pointer(signals, tl.int32) + two
    if PRIMITIVE == "put":
        il.put(target, two.to(tl.float32), first + two, group, two < COUNT)
    elif PRIMITIVE == "get":
        il.get(target, first + two, group, two < COUNT)
    elif PRIMITIVE == "signal":
        il.signal(flags, 0, first + two, group, two < COUNT)
    else:
        il.wait(flags, 0, first + two, 0, group, two < COUNT)


@triton.jit(do_not_specialize=["place"])
def reach(data, place, ctx, peer, PRIMITIVE: tl.constexpr):
    """Use two elements of symmetric memory from byte ``place`` on."""
    group = il.join(ctx)
    two = tl.arange(0, 2)
    inside = two >= 0
    floats = il.pointer(data, tl.float32) + place // 4 + two
    flags = il.pointer(data, tl.int32) + place // 4
    words = il.pointer(data, tl.int64) + place // 8 + two[:, None]
    if PRIMITIVE == "put":
        il.put(floats, two.to(tl.float32), peer, group)
    elif PRIMITIVE == "get":
        il.get(floats, peer, group)
    elif PRIMITIVE == "signal":
        il.signal(flags + two, 1, peer, group)
    elif PRIMITIVE == "wait":
        il.wait(flags + two, 0, peer + two * 0, 0, group, inside)
    elif PRIMITIVE == "get_packed":
        il.get_packed(words, tl.full([], 0, tl.int32), peer, 0, group, inside[:, None])
    else:
        tl.static_assert(PRIMITIVE == "get_lamport")
        il.get_lamport(floats, 0, peer, 0, group, inside)


@triton.jit
def wait_for_a_scalar(signals, ctx):
    """Wait for one signal, which is no tile."""
    il.wait(il.pointer(signals, tl.int32), 1, 0, 0, il.join(ctx), True)


@triton.jit
def wait_for_one(data, signals, ctx, peer, AWAITS: tl.constexpr):
    """Await one signal, or word, or value, of a peer that is a scalar, without a mask or with one
    that is a scalar.
    """
    group = il.join(ctx)
    one = tl.arange(0, 1)
    epoch = tl.full([], 1, tl.int32)
    if AWAITS == "signal":
        il.wait(il.pointer(signals, tl.int32) + one, epoch, peer, 0, group)
    elif AWAITS == "condition":
        il.wait(il.pointer(signals, tl.int32) + one, epoch, peer, 1, group, peer < 0)
        il.wait(il.pointer(signals, tl.int32) + one, epoch, peer, 0, group, peer >= 0)
    elif AWAITS == "word":
        il.get_packed(il.pointer(data, tl.int64) + one[:, None], epoch, peer, 0, group)
    else:
        il.get_lamport(il.pointer(data, tl.float32) + one, epoch, peer, 0, group)


@triton.jit
def mistype(data, ctx, MISTAKE: tl.constexpr):
    """Use memory as what it is not."""
    group = il.join(ctx)
    two = tl.arange(0, 2)
    epoch = tl.full([], 1, tl.int32)
    floats, words = il.pointer(data, tl.float32) + two, il.pointer(data, tl.int64) + two
    if MISTAKE == "address":
        il.put(data + two, two.to(tl.float32), 0, group)
    elif MISTAKE == "signal at an address":
        il.signal(data, epoch, 0, group)
    elif MISTAKE == "words at an address":
        il.put_packed(data + two, two.to(tl.float32), epoch, 0, group)
    elif MISTAKE == "half a word":
        il.pointer(data + 2, tl.int32)
    elif MISTAKE == "signal":
        il.signal(floats, epoch, 0, group)
    elif MISTAKE == "wait":
        il.wait(words, epoch, 0, 0, group)
    elif MISTAKE == "put_packed":
        il.put_packed(floats, two.to(tl.float32), epoch, 0, group)
    elif MISTAKE == "float16":
        il.put_packed(words, two.to(tl.float16), epoch, 0, group)
    elif MISTAKE == "get_packed":
        il.get_packed(floats[:, None], epoch, 0, 0, group)
    else:
        il.get_packed(words, epoch, 0, 0, group)


@triton.jit
def scatter(data, ctx, WORLD_SIZE: tl.constexpr):
    """Put element i to rank i: one put whose peer is a tile."""
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
    """Each rank writes its own copy, all meet, and each reads every rank's copy."""
    group = il.join(ctx)
    me = il.rank(group)
    i = tl.arange(0, BLOCK)
    local = il.pointer(data, tl.float32) + i
    il.put(local, (100 * me + i + epoch).to(tl.float32), me, group)
    arrived = il.barrier(il.pointer(signals, tl.int32), epoch, group, WORLD_SIZE)
    for peer in range(WORLD_SIZE):
        tl.store(out + peer * BLOCK + i, tl.where(arrived, il.get(local, peer, group), -1.0))


@triton.jit
def sum_words(
    words, out, ctx, epoch, WORLD_SIZE: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    """Add ``rank + 1 + i`` over ranks by packed words.

    The rank's own part is put as its peers put theirs, or kept in registers.
    """
    group = il.join(ctx)
    me = il.rank(group)
    position = tl.arange(0, BLOCK)[:, None] + tl.arange(0, 1)[None, :]
    part = (me + 1 + position).to(tl.float32)
    slots = il.pointer(words, tl.int64)
    for peer in range(WORLD_SIZE):
        il.put_packed(slots + me * BLOCK + position, part, epoch, peer, group)
    total = il.sum_packed(
        slots + position, part if KEEP else None, BLOCK, epoch, 0, group, position >= 0, WORLD_SIZE
    )
    tl.store(out + position, total)


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
    """Add ``values [BLOCK, 2]`` over ranks, two per word, and read the right neighbour's words
    alone.
    """
    group = il.join(ctx)
    me = il.rank(group)
    position = tl.arange(0, BLOCK)[:, None] + tl.arange(0, 1)[None, :]
    both = position[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    part = tl.load(values + both)
    slots = il.pointer(words, tl.int64)
    for peer in range(WORLD_SIZE):
        il.put_packed(slots + me * BLOCK + position, part, epoch, peer, group, VALUES=2)
    local = part if KEEP else None
    total = il.sum_packed(
        slots + position, local, BLOCK, epoch, 0, group, position >= 0, WORLD_SIZE, VALUES=2
    )
    tl.store(out + both, total)
    right = (me + 1) % WORLD_SIZE
    alone = il.get_packed(
        slots + right * BLOCK + position, epoch, right, 0, group, position >= 0, VALUES=2
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
    """Rank 0 puts four tiles of ``epoch`` and signals; rank 1 reads and answers."""
    group = il.join(ctx)
    i = tl.arange(0, BLOCK)
    target = il.pointer(data, tl.int32) + i
    flag = il.pointer(signals, tl.int32) + tl.zeros([1], tl.int32)
    answer = il.pointer(acknowledgements, tl.int32) + tl.zeros([1], tl.int32)
    single = tl.full([1], 1, tl.int1)
    if il.rank(group) == 0:
        for part in range(4):
            il.put(target + part * BLOCK, i * 0 + epoch, 1, group)
        if FENCE:
            il.fence(group)
        il.signal(flag, epoch, 1, group, ORDER=ORDER)
        il.wait(answer, epoch, tl.zeros([1], tl.int32) + 1, 0, group, single)
    else:
        il.wait(flag, epoch, tl.zeros([1], tl.int32), 0, group, single)
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
    """Store 1 for each of the signals ``seen`` that is behind the awaited one, and 0 for the
    others.
    """
    i = tl.arange(0, BLOCK)
    tl.store(behind + i, primitives.is_behind(tl.load(seen + i), tl.load(awaited + i)).to(tl.int32))


@triton.jit
def clear_signals(signals, epochs, ctx, count, DTYPE: tl.constexpr):
    epoch = il.next_epoch(epochs)
    il.clear_old(il.pointer(signals, DTYPE), count, epoch, il.join(ctx))
    il.advance_epoch(epochs, epoch)


@triton.jit
def copy_rows(x, y, rows, columns, stride, FACTOR: tl.constexpr):
    """Copy a matrix whose columns and stride are multiples of ``FACTOR``, a row per program."""
    columns, stride = il.multiple_of(columns, FACTOR), il.multiple_of(stride, FACTOR)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        for start in range(0, columns, 1024):
            n = start + tl.arange(0, 1024)
            value = tl.load(x + row.to(tl.int64) * stride + n, mask=n < columns)
            tl.store(y + row.to(tl.int64) * columns + n, value, mask=n < columns)
