"""A policy's loss and its metrics: seven numbers of each rank travel at once."""

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench.exchange import all_gather, replayed


@replayed
@torch.no_grad()
def solution(
    hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
    old_logprobs: torch.Tensor, advantages: torch.Tensor, ignore_index: int = -100,
) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    logits = F.linear(hidden_states, weight).flatten(0, -2)
    chosen = labels.flatten()
    entropy = F.cross_entropy(logits, chosen, ignore_index=ignore_index, reduction="none")
    padding = chosen == ignore_index
    delta = (-entropy - old_logprobs.flatten()).masked_fill(padding, 0.0).clamp(-20.0, 20.0)
    ratio = torch.exp(delta)
    loss = -(ratio * advantages.flatten()).masked_fill(padding, 0.0)
    sums = [
        (~padding).sum(), loss.sum(), ratio.masked_fill(padding, 0.0).sum(),
        (ratio - delta - 1.0).masked_fill(padding, 0.0).sum(),
        entropy.masked_fill(padding, 0.0).sum(),
        ratio.masked_fill(padding, float("inf")).min(),
        ratio.masked_fill(padding, float("-inf")).max(),
    ]  # fmt: skip
    ranks = all_gather(torch.stack([number.float() for number in sums])[None])
    count, total, ratios, k3, entropies = ranks[:, :5].sum(0).unbind()
    count = count.clamp(min=1.0)
    metrics = [ratios / count, ranks[:, 5].min(), ranks[:, 6].max(), k3 / count, entropies / count]
    shape = labels.shape
    return total / count, None, -entropy.view(shape), loss.view(shape), torch.stack(metrics)
