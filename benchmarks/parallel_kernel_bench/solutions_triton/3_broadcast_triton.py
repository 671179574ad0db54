"""Broadcast."""

import torch

from benchmarks.parallel_kernel_bench.exchange import move


@torch.no_grad()
def solution(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    sizes, nowhere = (1, 1, tensor.numel()), (0, 0, 0)
    return move(tensor, torch.empty_like(tensor), sizes, nowhere, nowhere, root=src)
