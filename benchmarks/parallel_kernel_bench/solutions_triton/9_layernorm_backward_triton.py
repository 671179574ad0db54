"""The gradients of a layer norm's weight and bias: both sums travel together."""

import torch

from benchmarks.parallel_kernel_bench.exchange import add


@torch.no_grad()
def solution(X_hat: torch.Tensor, dY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums = dY.new_empty(2, dY.shape[1])
    d_gamma, d_beta = sums.unbind()
    torch.sum(dY * X_hat, 0, out=d_gamma)
    torch.sum(dY, 0, out=d_beta)
    add(sums, sums)
    return d_gamma, d_beta
