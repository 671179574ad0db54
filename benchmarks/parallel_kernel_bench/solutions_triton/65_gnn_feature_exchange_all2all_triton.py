"""Rows of features to the ranks that asked for them, read where they are.

The bench's chunk j on rank r is for rank ``(r + j) % R``.
"""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import exchange_rows, replayed


def turned(counts: list[int], rank: int) -> tuple[list[int], list[int], list[int]]:
    """Return chunks' sizes and starts by rank, and which chunk comes first, second, ..."""
    order = [(peer - rank) % len(counts) for peer in range(len(counts))]
    return [counts[j] for j in order], [sum(counts[:j]) for j in order], order


@replayed
@torch.no_grad()
def solution(
    local_features: torch.Tensor, seed_inverse_ids: torch.Tensor, counts_sent: list[int],
    counts_received: list[int], group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    rank = dist.get_rank(group)
    sizes, starts, _ = turned(counts_received, rank)
    expected, _, order = turned(counts_sent, rank)
    most = max(counts_sent + counts_received)
    y = exchange_rows(
        local_features, sizes, expected, most, take=seed_inverse_ids, starts=starts, group=group
    )
    parts = dict(zip(order, y.split(expected), strict=True))
    return y if rank == 0 else torch.cat([parts[j] for j in range(len(order))])
