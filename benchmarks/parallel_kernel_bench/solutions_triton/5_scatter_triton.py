"""Scatter: rank ``src`` has ``[R, ...]``, the others a tensor of the result's shape."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import move


@torch.no_grad()
def solution(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    shape = tensor.shape
    if dist.get_rank() == src:
        ranks = dist.get_world_size()
        # As many rows per rank as there are; a single one is no dimension of the result.
        rows = shape[0] // ranks
        shape = shape[1:] if rows == 1 else (rows, *shape[1:])
    part = tensor.new_empty(shape)
    size = part.numel()
    return move(tensor, part, (1, 1, size), (size, 0, 0), (0, 0, 0), root=src)
