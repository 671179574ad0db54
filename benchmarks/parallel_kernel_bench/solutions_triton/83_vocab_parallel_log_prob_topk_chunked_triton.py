"""Log-probabilities of tokens under top-k and top-p of a sharded vocabulary.

Each rank filters some tokens' whole rows, and all get the results.
"""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_gather, all_to_all, replayed
from benchmarks.parallel_kernel_bench.sampling import filtered


@replayed
@torch.no_grad()
def solution(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None, top_k: int | None = None, top_p: float = 1.0,
    chunk_size: int = 1,
) -> torch.Tensor:  # fmt: skip
    logits = all_to_all(vocab_parallel_logits.flatten(0, 1), 0, 1, tp_group)
    own = target.flatten().chunk(dist.get_world_size(tp_group))[dist.get_rank(tp_group)]
    log_probs = filtered(logits, top_k, top_p).float().log_softmax(-1)
    return all_gather(log_probs.gather(1, own[:, None]), 0, tp_group).view(target.shape)
