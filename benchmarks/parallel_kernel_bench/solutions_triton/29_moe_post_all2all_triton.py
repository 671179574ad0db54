"""Send experts' outputs back to their tokens, and add them, each times its weight."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import exchange_rows, replayed


@replayed
def solution(
    expert_outputs: torch.Tensor, routing_weights: torch.Tensor, selected_experts: torch.Tensor,
    num_experts: int, input_splits: list[int], output_splits: list[int],
    num_global_tokens_per_local_expert: torch.Tensor, routing_map: torch.Tensor,
    local_input_permutation_mapping: torch.Tensor, org_hidden_states_shape: torch.Size,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    counts, total = num_global_tokens_per_local_expert, expert_outputs.shape[0]
    # Runs of rows are by expert, then by rank, and go by rank, then by expert.
    starts = (counts.T.flatten().cumsum(0) - counts.T.flatten()).view(counts.T.shape).T.flatten()
    runs = counts.flatten()
    take = torch.repeat_interleave(starts - runs.cumsum(0) + runs, runs, output_size=total)
    take += torch.arange(total, device=take.device)
    most = routing_weights.numel()
    rows = exchange_rows(
        expert_outputs, output_splits, input_splits, most, take=take, group=group
    )  # fmt: skip
    token = local_input_permutation_mapping
    weights = routing_weights.new_zeros(routing_weights.shape[0], num_experts)
    weights.scatter_add_(1, selected_experts, routing_weights)
    expert = torch.nonzero_static(routing_map, size=rows.shape[0])[:, 0]
    y = rows.new_zeros(org_hidden_states_shape)
    return y.index_add_(0, token, rows * weights[token, expert][:, None])
