"""A kernel puts its slices over the network itself, to ranks that share no memory with it.

The program that completes a slice puts it, and a signal behind it; nothing passes through the host.
On GPUs this is NCCL's device API, by the package ``interlace_gin``. **That has been compiled and
never run**: it needs a network card that NCCL can drive from the GPU. On the CPU backend messages
of Gloo carry the same puts, so this example runs there, on two ranks that count as two nodes.

On two machines: ``torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint
HOST0:29500 examples/07_puts_over_the_network.py``.
"""

import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import interlace
import interlace.language as il
from interlace_gin import open_gin
from interlace_gin.language import gin_put, gin_wait

SLICES, BLOCKS, BLOCK, CALLS = 4, 2, 256, 3
"""Slices for each peer, blocks of a slice, elements of a block, calls."""


@triton.jit(do_not_specialize=["staging", "half", "gin", "source", "landing"])
def double_and_put(
    x, staging, counters, half, gin, source, landing, ctx,
    WORLD_SIZE: tl.constexpr, SLICES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``2 * x[peer]`` for every other rank, and put each slice once it is complete.

    Protocol: staging and landing are ``[2][rank][slice][BLOCKS * BLOCK]``, and calls take turns
    with the halves. Signal ``source * SLICES + slice`` of a rank counts that slice's puts. A half
    is written again two calls later, when its rank has the peer's slices of the call in between.
    The peer has sent them behind its call before, in which it has read the half.
    """
    group = il.join(ctx)
    me = il.rank(group)
    # Slice 0 of every peer, then slice 1: peers get their first slices early.
    step = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    slice = step // (WORLD_SIZE - 1)
    peer = (me + 1 + step % (WORLD_SIZE - 1)) % WORLD_SIZE

    start = (peer * SLICES + slice) * BLOCKS * BLOCK
    i = start + block * BLOCK + tl.arange(0, BLOCK)
    offset = half * WORLD_SIZE * SLICES * BLOCKS * BLOCK
    tl.store(il.pointer(staging, tl.float32) + offset + i, 2 * tl.load(x + i))
    if il.arrive_last(counters + peer * SLICES + slice, block, BLOCKS):
        gin_put(
            gin, landing, (offset + (me * SLICES + slice) * BLOCKS * BLOCK) * 4,
            source, (offset + start) * 4, BLOCKS * BLOCK * 4, peer, me * SLICES + slice, group,
        )  # fmt: skip


@triton.jit(do_not_specialize=["landing", "half", "gin"])
def collect(
    y, landing, half, gin, ctx,
    WORLD_SIZE: tl.constexpr, SLICES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Wait for one slice of one peer and copy it to its place; NaN if it does not come."""
    group = il.join(ctx)
    step = tl.program_id(0) // SLICES
    slice = tl.program_id(0) % SLICES
    peer = (il.rank(group) + 1 + step) % WORLD_SIZE
    i = (peer * SLICES + slice) * SIZE + tl.arange(0, SIZE)
    arrived = gin_wait(gin, peer * SLICES + slice, 1, peer, slice, group)
    landed = il.pointer(landing, tl.float32) + half * WORLD_SIZE * SLICES * SIZE + i
    # What the network has brought is not in a cache that may be old.
    tl.store(y + i, il.nan_unless(arrived.to(tl.int32), tl.load(landed, cache_modifier=".cg")))


def worker() -> list[float]:
    """Exchange doubled rows in several calls; return the largest error of each."""
    group = interlace.group_of()
    me, ranks, size = group.rank, group.world_size, SLICES * BLOCKS * BLOCK
    gin = open_gin(signals=ranks * SLICES)
    staging, landing = (gin.window(2 * ranks * size * 4) for _ in range(2))
    counters = torch.zeros(ranks * SLICES, dtype=torch.int32, device=group.device)
    context = group.context("example")
    numbers = torch.arange(size, dtype=torch.float32, device=group.device)
    errors = []
    for call in range(CALLS):
        # Of rank r for rank p: numbers + 10000 * r + 100 * p + call.
        x = numbers + torch.arange(ranks, device=group.device)[:, None] * 100 + me * 10000 + call
        y = 2 * x  # this rank's own rows stay
        with group.running():
            double_and_put[((ranks - 1) * SLICES * BLOCKS,)](
                x=x, staging=staging.address, counters=counters, half=call % 2, gin=gin.address,
                source=staging.handle, landing=landing.handle, ctx=context, WORLD_SIZE=ranks,
                SLICES=SLICES, BLOCKS=BLOCKS, BLOCK=BLOCK, **gin.options,
            )  # fmt: skip
            collect[((ranks - 1) * SLICES,)](
                y=y, landing=landing.address, half=call % 2, gin=gin.address, ctx=context,
                WORLD_SIZE=ranks, SLICES=SLICES, SIZE=BLOCKS * BLOCK, **gin.options,
            )  # fmt: skip
        # This raises an error if a peer's slices did not come before the deadline.
        group.synchronize()
        senders = torch.arange(ranks, device=group.device)[:, None]
        expected = 2 * (numbers + senders * 10000 + me * 100 + call)
        errors.append((y - expected).abs().max().item())
    # A rank that closes ends its peers' puts to it.
    dist.barrier()
    gin.close()
    return errors


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        everyone = [worker()]
        dist.destroy_process_group()
    else:
        everyone = interlace.launch(worker, 2, backend="cpu", nodes=2)
    for errors in everyone:
        print(f"largest error of each call: {errors}")
        assert errors == [0.0] * CALLS


if __name__ == "__main__":
    main()
