"""Adam of this rank's weights, and their gather, in one launch."""

import torch
from torch import Tensor

from benchmarks.parallel_kernel_bench.training import adam


@torch.no_grad()
def solution(
    grad_shard: Tensor, master_shard: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, lr: float,
    beta1: float, beta2: float, eps: float, step: int,
) -> Tensor:  # fmt: skip
    numbers, moments = (lr, beta1, beta2, eps, step), (exp_avg, exp_avg_sq)
    return adam(grad_shard, master_shard, *moments, numbers, summed=False, gather=True)[0]
