"""Rotary embedding of q and k at once, and one gather along the sequence."""

import torch

from benchmarks.parallel_kernel_bench.exchange import all_gather, replayed


@replayed
def solution(
    q_local: torch.Tensor, k_local: torch.Tensor, cos_local: torch.Tensor, sin_local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack([q_local, k_local])
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    x = x * cos_local[:, :, None] + turned * sin_local[:, :, None]
    q, k = all_gather(x, 2)
    return q, k
