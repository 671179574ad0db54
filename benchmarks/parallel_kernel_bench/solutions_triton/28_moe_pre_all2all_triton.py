"""Send tokens to the ranks of their experts, ordered by expert where they arrive: one launch for
rows, which are read where they are and land where they belong.
"""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import exchange_rows, replayed


@replayed
def solution(
    hidden_states: torch.Tensor, expert_mask: torch.Tensor, num_experts: int,
    input_splits: list[int], output_splits: list[int],
    num_global_tokens_per_local_expert: torch.Tensor, group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]:  # fmt: skip
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    routing = expert_mask.sum(1)
    tokens = torch.nonzero_static(routing, size=sum(input_splits))[:, 1].contiguous()
    counts = num_global_tokens_per_local_expert
    # Runs of rows come by rank, then by expert, and go by expert, then by rank.
    starts = (counts.T.flatten().cumsum(0) - counts.T.flatten()).view(counts.T.shape).T.flatten()
    runs = counts.flatten()
    shift, total = starts - runs.cumsum(0) + runs, sum(output_splits)
    place = torch.repeat_interleave(shift, runs, output_size=total)
    place += torch.arange(total, device=x.device)
    most = x.shape[0] * expert_mask.shape[1]
    y = exchange_rows(
        x, input_splits, output_splits, most, take=tokens, place=place, group=group
    )  # fmt: skip
    return y, routing, tokens, x.shape
