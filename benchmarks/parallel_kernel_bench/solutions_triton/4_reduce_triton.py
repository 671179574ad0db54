"""Sum on one rank; the others return what they gave."""

import torch

from benchmarks.parallel_kernel_bench.exchange import add


@torch.no_grad()
def solution(tensor: torch.Tensor, dst: int = 0) -> torch.Tensor:
    return add(tensor, torch.empty_like(tensor), into=dst)
