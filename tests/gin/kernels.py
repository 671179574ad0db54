"""Kernels of ``test_puts``; imported by ranks only, where the interpreter is on."""

import triton
import triton.language as tl

import interlace.language as il
from interlace_gin.language import gin_arrived, gin_put, gin_sent, gin_wait


@triton.jit
def put_some(gin, window, start, nbytes, peer, signal, counter, puts, ctx):
    """Put the same range to itself of another rank, several times."""
    group = il.join(ctx)
    for _ in range(puts):
        gin_put(gin, window, start, window, start, nbytes, peer, signal, group, counter)


@triton.jit
def take(found, gin, signal, first, second, peer, ctx):
    """Wait for some puts, count what is left, and wait for some more; -1 for a wait that fails."""
    group = il.join(ctx)
    if gin_wait(gin, signal, first, peer, 2, group):
        # All have been sent before this kernel began; they arrive a little later.
        if gin_wait(gin, signal, second, peer, 3, group):
            tl.store(found, gin_arrived(gin, signal).to(tl.int32))
        else:
            tl.store(found, -2)
    else:
        tl.store(found, -1)


@triton.jit
def await_sent(found, gin, counter, puts, ctx):
    """Wait until puts have been sent."""
    group = il.join(ctx)
    sent = gin_sent(gin, counter, puts, -1, 0, group)
    tl.store(found, sent.to(tl.int32))
