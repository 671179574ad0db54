"""Gradients of log-probabilities under top-k and top-p of a sharded vocabulary."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_to_all, replayed
from benchmarks.parallel_kernel_bench.sampling import filtered


@replayed
@torch.no_grad()
def solution(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, grad_output: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None, top_k: int | None = None, top_p: float = 1.0,
    chunk_size: int = 1,
) -> torch.Tensor:  # fmt: skip
    ranks, rank = dist.get_world_size(tp_group), dist.get_rank(tp_group)
    logits = all_to_all(vocab_parallel_logits.flatten(0, 1), 0, 1, tp_group)
    own, grad = (t.flatten().chunk(ranks)[rank][:, None] for t in (target, grad_output))
    kept = filtered(logits, top_k, top_p)
    chosen = torch.arange(kept.shape[1], device=kept.device) == own
    d_logits = (chosen.float() - kept.float().softmax(-1)) * grad * (kept > float("-inf"))
    return all_to_all(d_logits, 1, 0, tp_group).view(vocab_parallel_logits.shape)
