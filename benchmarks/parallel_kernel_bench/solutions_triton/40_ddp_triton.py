"""A step of data parallelism: rank 0's state to all, then gradients' sum and Adam in one launch."""

import torch
from torch import Tensor

from benchmarks.parallel_kernel_bench.exchange import replayed
from benchmarks.parallel_kernel_bench.training import adam, broadcast, gradients, unflattened


@replayed
@torch.no_grad()
def solution(
    X_local: Tensor, y_local: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor,
    exp_avg_W1: Tensor, exp_avg_b1: Tensor, exp_avg_W2: Tensor, exp_avg_b2: Tensor,
    exp_avg_sq_W1: Tensor, exp_avg_sq_b1: Tensor, exp_avg_sq_W2: Tensor, exp_avg_sq_b2: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, step: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    params = [W1, b1, W2, b2]
    first = [exp_avg_W1, exp_avg_b1, exp_avg_W2, exp_avg_b2]
    second = [exp_avg_sq_W1, exp_avg_sq_b1, exp_avg_sq_W2, exp_avg_sq_b2]
    weight, m, v = broadcast(params + first + second).chunk(3)
    shapes = [param.shape for param in params]
    grad = gradients(X_local, y_local, unflattened(weight, shapes))
    new = adam(grad, weight, m, v, (lr, beta1, beta2, eps, step), summed=True, gather=False)
    return tuple(part for flat in new for part in unflattened(flat, shapes))
