"""A step with sharded moments: gradients to the ranks that need them, Adam, and the new weights
back to all, in one launch.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parallel_kernel_bench.exchange import replayed
from benchmarks.parallel_kernel_bench.training import adam, broadcast, gradients, unflattened


@replayed
@torch.no_grad()
def solution(
    X_local: Tensor, y_local: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor,
    exp_avg_part: Tensor, exp_avg_sq_part: Tensor, lr: float, beta1: float, beta2: float,
    eps: float, step: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    params = [W1, b1, W2, b2]
    shapes, flat = [param.shape for param in params], broadcast(params)
    grad = gradients(X_local, y_local, unflattened(flat, shapes))
    weight = flat.chunk(dist.get_world_size())[dist.get_rank()]
    numbers = lr, beta1, beta2, eps, step
    moments = exp_avg_part, exp_avg_sq_part
    flat, m, v = adam(grad, weight, *moments, numbers, summed=True, gather=True)
    return *unflattened(flat, shapes), m, v
