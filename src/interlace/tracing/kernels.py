"""Kernels before and after what is traced: ranks begin together; their clocks are compared."""

import triton
import triton.language as tl

import interlace.language as il


@triton.jit(do_not_specialize=["signals", "unread", "duration"])
def hold(
    signals, unread, ctx, duration, UNREAD: tl.constexpr, WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep what follows on this stream back for a while, and until all ranks have come here.

    One program on each rank. Protocol: it reads the clock until ``duration`` has passed, fills
    ``unread`` on every peer, then signals every peer and waits for every peer's signal, which
    comes after what the peer has written.

    Links that have carried nothing for some time sleep, each by itself, and the next message over
    one waits until it has woken up. Writes to many addresses use all of them, so that calls in a
    trace find them as they are in a program that communicates all the time.

    Example: rank 0 comes at 100 and rank 1 at 180, with a duration of 1000: both leave soon after
    1180.

    Args:
        signals: Address of ``2 * WORLD_SIZE`` int32 signals, which are 0 at first.
        unread: Address of ``UNREAD`` int32, which every peer fills with 0 and nobody reads.
        duration: In ns, 64 bits.
        UNREAD: A multiple of ``BLOCK``.
    """
    group = il.join(ctx)
    me = il.rank(group)
    clock = tl.arange(0, 32)
    start = tl.max(il.clock_ns(clock), 0)
    while tl.max(il.clock_ns(clock), 0) - start < duration:
        pass
    elements = tl.arange(0, BLOCK)
    for peer in range(WORLD_SIZE):
        if peer != me:
            for first in range(0, UNREAD, BLOCK):
                target = il.pointer(unread, tl.int32) + first + elements
                il.put(target, tl.zeros_like(elements), peer, group)
    il.barrier(il.pointer(signals, tl.int32), 1, group, WORLD_SIZE)


@triton.jit(do_not_specialize=["signals", "rounds", "client", "server"])
def compare_clocks(signals, times, ctx, rounds, client, server):
    """Let ``client`` ask ``server`` for the time, ``rounds`` times. One program on each of the two.

    Protocol: in round i, from 1 on, the client notes its time, sets signal 0 on the server to i,
    waits until signal 1 is i here, and notes its time again. The server waits for signal 0, notes
    its time, and sets signal 1 on the client. Either waits for what the other sends before its own
    next wait.

    Example: client at 100 and 180, server at 1000140: the server's clock is 1000000 ahead, and the
    answer cannot be wrong by more than 40.

    Args:
        signals: Address of two int32 signals, which are 0 at first.
        times: int64 ``[2, rounds]``: the client's times before and after; the server's in the
            first row.
    """
    group = il.join(ctx)
    me = il.rank(group)
    flags = il.pointer(signals, tl.int32)
    lanes = tl.arange(0, 1)
    clock = tl.arange(0, 32)
    for turn in range(1, rounds + 1):
        if me == client:
            tl.store(times + turn - 1, tl.max(il.clock_ns(clock), 0))
            il.signal(flags, turn, server, group)
            il.wait(flags + 1 + lanes, turn, server + lanes, turn, group, lanes >= 0)
            tl.store(times + rounds + turn - 1, tl.max(il.clock_ns(clock), 0))
        else:
            il.wait(flags + lanes, turn, client + lanes, turn, group, lanes >= 0)
            tl.store(times + turn - 1, tl.max(il.clock_ns(clock), 0))
            il.signal(flags + 1, turn, client, group)
