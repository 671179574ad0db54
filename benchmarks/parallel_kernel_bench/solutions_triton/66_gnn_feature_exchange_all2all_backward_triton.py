"""Gradients of rows back to the ranks that sent them, and their sums by row.

The bench's chunk j on rank r is for rank ``(r + j) % R``.
"""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import exchange_rows, replayed


@replayed
@torch.no_grad()
def solution(
    grad_output: torch.Tensor, seed_inverse_ids: torch.Tensor, seed_size: int,
    counts_sent: list[int], counts_received: list[int], group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    order = [(peer - rank) % ranks for peer in range(ranks)]
    rows = exchange_rows(
        grad_output, [counts_sent[j] for j in order], [counts_received[j] for j in order],
        max(counts_sent + counts_received), starts=[sum(counts_sent[:j]) for j in order],
        group=group,
    )  # fmt: skip
    # Rows come by rank; the ids are by chunk.
    ids = seed_inverse_ids.split(counts_received)
    y = grad_output.new_zeros(seed_size, *grad_output.shape[1:])
    return y.index_add_(0, torch.cat([ids[j] for j in order]), rows)
