"""A loss over a sharded vocabulary in one launch: rows' maxima travel as packed words, then their
sums and the targets' logits.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import interlace.language as il
from benchmarks.parallel_kernel_bench.exchange import begin, run, sum_over_ranks


@triton.jit(do_not_specialize=["data", "signals", "mark", "half"])
def loss_kernel(
    logits, target, loss, data, signals, epochs, ctx, mark, half,
    M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute the loss of ``ROWS`` tokens per program, with the roundings of the logits' dtype."""
    epoch, stamp, group, me, half_at, _ = begin(data, signals, epochs, ctx, mark, half, WORLD_SIZE)
    m, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)[None, :]
    inside = (m[:, None] < M) & (n < N)
    x = tl.load(logits + m[:, None] * N + n, mask=inside, other=float("-inf"))
    own = tl.max(x.to(tl.float32), 1)
    most, words = own, il.pointer(half_at, tl.int64) + m[:, None]
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (me + step) % WORLD_SIZE
        il.put_packed(words + me * M, own[:, None], stamp, peer, group, (m < M)[:, None])
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (me + step) % WORLD_SIZE
        slot = words + peer * M
        other = il.get_packed(slot, stamp, peer, 0, group, (m < M)[:, None])
        most = tl.maximum(most, tl.sum(other, 1))
    shifted = (x.to(tl.float32) - most[:, None]).to(x.dtype).to(tl.float32)
    sums = tl.sum(tl.exp(shifted).to(x.dtype).to(tl.float32), 1).to(x.dtype).to(tl.float32)
    column = tl.load(target + m, mask=m < M, other=0) - me * N
    chosen = tl.sum(tl.where(inside & (n == column[:, None]), shifted, 0.0), 1)
    half_at += (WORLD_SIZE * M + 1) // 2 * 16
    sums = sum_over_ranks(half_at, m, sums, m < M, stamp, me, group, M, WORLD_SIZE)
    half_at += (WORLD_SIZE * M + 1) // 2 * 16
    chosen = sum_over_ranks(half_at, m, chosen, m < M, stamp, me, group, M, WORLD_SIZE)
    value = tl.log(sums.to(x.dtype).to(tl.float32)).to(x.dtype).to(tl.float32)
    tl.store(loss + m, value - chosen, mask=m < M)
    il.advance_epoch(epochs, epoch)


@torch.no_grad()
def solution(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    m, n = target.numel(), vocab_parallel_logits.shape[-1]
    loss = torch.empty_like(target, dtype=vocab_parallel_logits.dtype)
    cols = triton.next_power_of_2(n)
    rows = max(4096 // cols, 1)
    run(
        loss_kernel, triton.cdiv(m, rows), dist.get_world_size(group) * (m + 1) * 24,
        vocab_parallel_logits, target, loss, group=group, M=m, N=n, ROWS=rows, COLS=cols,
    )  # fmt: skip
    return loss
