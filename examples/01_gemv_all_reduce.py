"""A linear layer whose weight is sharded over the ranks: product and all-reduce in one kernel.

Run it with ``python examples/01_gemv_all_reduce.py``, which starts two processes, or under
torchrun. Without GPUs, kernels run in Triton's interpreter.
"""

import torch
import torch.distributed as dist

import interlace


def worker() -> float:
    """Compute the layer on this rank, and return the relative error of the result."""
    rank, device = dist.get_rank(), interlace.group_of().device
    torch.manual_seed(rank)
    # The full layer has K = 256 input features. Each of the two ranks holds 128 of them, and
    # the 128 columns of the weight [96, 256] that they are multiplied with.
    x_shard_k = torch.randn(1, 128, device=device)
    w_shard_k = torch.randn(96, 128, device=device)

    # y [1, 96] is the sum of all ranks' products, and the same on every rank.
    y = interlace.gemv_all_reduce(x_shard_k, w_shard_k)

    # The same result by torch.distributed, in float64.
    expected = x_shard_k.double() @ w_shard_k.double().T
    dist.all_reduce(expected)
    return float((y - expected).norm() / expected.norm())


def main() -> None:
    errors = interlace.launch(worker, 2)
    print("relative error by rank:", ", ".join(f"{error:.1e}" for error in errors))
    assert max(errors) < 1e-6


if __name__ == "__main__":
    main()
