"""Communication from a kernel of your own: every rank sends a tile to every peer, and adds them.

``il.put_signal`` stores a tile in a peer's memory and then sets a signal there; ``il.wait`` waits
for signals of this rank, with a deadline. On the CPU the same kernel runs in Triton's interpreter,
in the processes that ``interlace.launch`` starts. They import this file, so kernels must be at its
top level. (Under torchrun without GPUs, set TRITON_INTERPRET=1 yourself.)
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import interlace
import interlace.language as il

SIZE, CALLS = 64, 3


@triton.jit(do_not_specialize=["data", "signals", "epoch"])
def all_reduce(x, y, data, signals, epoch, ctx, WORLD_SIZE: tl.constexpr, SIZE: tl.constexpr):
    """Compute ``y = sum over ranks of x``, in rank order.

    Protocol: slots are ``[epoch % 2][source][SIZE]``, signals ``[source]``. Each has one writer,
    and signals only grow. A slot is written again two calls later. By then its writer has the
    reader's tile of the call in between, which the reader sends after it has read the slot.
    """
    group = il.join(ctx)
    me = il.rank(group)
    i = tl.arange(0, SIZE)
    slots = il.pointer(data, tl.float32) + (epoch % 2) * WORLD_SIZE * SIZE + i
    flags = il.pointer(signals, tl.int32)
    part = tl.load(x + i)
    # The next rank first and this rank last: at every step, each rank sends to another peer.
    for step in tl.static_range(WORLD_SIZE):
        il.put_signal(
            slots + me * SIZE, part, flags + me, epoch, (me + 1 + step) % WORLD_SIZE, group
        )
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    arrived = il.wait(flags + peers, epoch, peers, 0, group, peers < WORLD_SIZE)
    # Adding in rank order gives the same bits on every rank.
    total = tl.zeros([SIZE], tl.float32)
    for source in tl.static_range(WORLD_SIZE):
        total += il.get(slots + source * SIZE, me, group)
    # After a failed wait the slots hold old data, so the result is NaN.
    tl.store(y + i, tl.where(arrived, total, float("nan")))


def worker() -> tuple[list[float], int]:
    """Call the kernel; return the first element of each sum, and the number of this rank's puts."""
    group = interlace.group_of()
    data = interlace.empty_symmetric((2, group.world_size, SIZE), dtype=torch.float32)
    signals = interlace.empty_symmetric(group.world_size, dtype=torch.int32)
    sums = []
    for epoch in range(1, CALLS + 1):
        x = torch.full((SIZE,), float(epoch * 10**group.rank), device=group.device)
        y = torch.empty_like(x)
        with group.running():
            all_reduce[(1,)](
                x=x,
                y=y,
                data=data.address,
                signals=signals.address,
                epoch=epoch,
                ctx=group.context("example"),
                WORLD_SIZE=group.world_size,
                SIZE=SIZE,
            )
        # This raises an error if a peer did not come before the deadline.
        group.synchronize()
        sums.append(y[0].item())
    # No rank may free memory that a peer still reads.
    dist.barrier()
    return sums, group.traffic.messages


def main() -> None:
    for rank, (sums, puts) in enumerate(interlace.launch(worker, 2)):
        # Puts are counted in the interpreter only.
        counted = f", {puts} puts to its peer" if puts else ""
        print(f"rank {rank}: sums of {CALLS} calls: {sums}{counted}")
        assert sums == [11.0, 22.0, 33.0]


if __name__ == "__main__":
    main()
