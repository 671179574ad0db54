"""Ulysses' attention: q, k and v travel in one exchange."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench.exchange import all_to_all, replayed


@replayed
def solution(
    hidden_states: torch.Tensor, w_qkv: torch.Tensor, w_o: torch.Tensor,
    group: dist.ProcessGroup | None = None, num_heads: int = 8, causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    qkv = F.linear(hidden_states, w_qkv).unflatten(-1, (3, num_heads, -1))
    q, k, v = all_to_all(qkv, 3, 1, group).unbind(2)
    # The bench's attention is of each position's heads to one another.
    scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    if causal and q.shape[1] > 1:
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    context = torch.matmul(F.softmax(scores, -1), v)
    return F.linear(all_to_all(context, 1, 2, group).flatten(2), w_o)
