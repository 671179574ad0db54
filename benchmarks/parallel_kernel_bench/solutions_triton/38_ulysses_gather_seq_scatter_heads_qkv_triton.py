"""Ulysses' all-to-all of q, k and v, which lie side by side."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_to_all


def solution(
    qkv_tensor: torch.Tensor, seq_dim: int, group: dist.ProcessGroup | None = None,
    unpadded_dim_size: int | None = None, restore_shape: bool = True,
) -> torch.Tensor:  # fmt: skip
    three = qkv_tensor.contiguous().unflatten(-1, (3, -1))
    y = all_to_all(three, three.dim() - 1, seq_dim, group)
    y = y.flatten(-2) if restore_shape else y
    return y.narrow(seq_dim, 0, unpadded_dim_size) if unpadded_dim_size else y
