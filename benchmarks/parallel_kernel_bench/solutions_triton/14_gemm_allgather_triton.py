"""The product, and one launch that gathers its columns."""

import torch

from benchmarks.parallel_kernel_bench.exchange import all_gather


@torch.no_grad()
def solution(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    return all_gather(torch.mm(A, B), 1)
