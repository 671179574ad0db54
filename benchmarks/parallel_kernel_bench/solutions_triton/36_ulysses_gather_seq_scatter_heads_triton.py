"""Ulysses' all-to-all from a part of the sequence to a part of the heads."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_to_all


def solution(
    x: torch.Tensor, seq_dim: int, head_dim: int, group: dist.ProcessGroup | None = None,
    unpadded_dim_size: int = 0,
) -> torch.Tensor:  # fmt: skip
    y = all_to_all(x.contiguous(), head_dim, seq_dim, group)
    return y.narrow(seq_dim, 0, unpadded_dim_size) if unpadded_dim_size else y
