"""All-to-all."""

import torch

from benchmarks.parallel_kernel_bench.exchange import all_to_all


@torch.no_grad()
def solution(tensor: torch.Tensor) -> torch.Tensor:
    return all_to_all(tensor, 0, 0)
