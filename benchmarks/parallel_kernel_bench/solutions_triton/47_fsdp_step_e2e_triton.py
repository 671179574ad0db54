"""A step of FSDP: one launch gathers the weights, another sums gradients and updates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.parallel_kernel_bench.exchange import all_gather, replayed
from benchmarks.parallel_kernel_bench.training import adam, gradients, unflattened


@replayed
@torch.no_grad()
def solution(
    X_local: Tensor, y_local: Tensor, flat_param_shard: Tensor,
    param_shapes: Sequence[tuple[int, ...]], exp_avg_shard: Tensor, exp_avg_sq_shard: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    params = unflattened(all_gather(flat_param_shard), param_shapes)
    grad = gradients(X_local, y_local, params)
    return adam(
        grad, flat_param_shard, exp_avg_shard, exp_avg_sq_shard, (lr, beta1, beta2, eps, step),
        summed=True, gather=False, decay=weight_decay,
    )  # fmt: skip
