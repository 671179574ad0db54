"""All-reduce."""

import torch

from benchmarks.parallel_kernel_bench.exchange import all_reduce


@torch.no_grad()
def solution(tensor: torch.Tensor) -> torch.Tensor:
    return all_reduce(tensor)
