"""The loss that spreads tokens over experts, the mean over the ranks."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_reduce, replayed


@replayed
def solution(
    gate_logits: torch.Tensor | tuple[torch.Tensor, ...], num_experts: int, top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    logits = torch.cat(list(gate_logits)) if isinstance(gate_logits, (tuple, list)) else gate_logits
    weights = torch.softmax(logits, -1)
    experts = torch.topk(weights, top_k, -1).indices
    chosen = (experts[..., None] == torch.arange(num_experts, device=experts.device)).float()
    if attention_mask is None:
        tokens, router = chosen.mean(0), weights.mean(0)
    else:
        mask = attention_mask.reshape(-1).repeat(len(logits) // attention_mask.numel())
        tokens = (chosen * mask[:, None, None]).sum(0) / mask.sum()
        router = (weights * mask[:, None]).sum(0) / mask.sum()
    return all_reduce((tokens * router).sum() * num_experts) / dist.get_world_size()
