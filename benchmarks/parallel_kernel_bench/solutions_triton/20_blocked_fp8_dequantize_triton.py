"""Send codes and scales instead of float32, and multiply where they arrive."""

import torch

from benchmarks.parallel_kernel_bench.exchange import all_to_all, replayed


@replayed
def solution(local_y: torch.Tensor, local_s: torch.Tensor, block_size: int = 128) -> torch.Tensor:
    codes, scales = all_to_all(local_y, 0, 0), all_to_all(local_s, 0, 0)
    blocks = codes.view(-1, block_size).float() * scales.view(-1, 1).float()
    return blocks.view(local_y.shape)
