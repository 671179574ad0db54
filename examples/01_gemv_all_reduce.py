"""A linear layer whose weight is shared out over the ranks: product and all-reduce in one kernel.

Run it as it is (two processes start; without GPUs, kernels run in Triton's interpreter), or under
torchrun.
"""

import torch
import torch.distributed as dist

import interlace


def worker() -> float:
    """Every rank runs this; the result is its relative error."""
    rank, device = dist.get_rank(), interlace.group_of().device
    torch.manual_seed(rank)
    x_shard_k = torch.randn(1, 128, device=device)  # this rank's 128 of K = 256 features
    w_shard_k = torch.randn(96, 128, device=device)  # and its columns of the weight [96, 256]

    y = interlace.gemv_all_reduce(x_shard_k, w_shard_k)  # [1, 96], the same on every rank

    expected = x_shard_k.double() @ w_shard_k.double().T
    dist.all_reduce(expected)
    return float((y - expected).norm() / expected.norm())


def main() -> None:
    errors = interlace.launch(worker, 2)
    print("relative error by rank:", ", ".join(f"{error:.1e}" for error in errors))
    assert max(errors) < 1e-6


if __name__ == "__main__":
    main()
