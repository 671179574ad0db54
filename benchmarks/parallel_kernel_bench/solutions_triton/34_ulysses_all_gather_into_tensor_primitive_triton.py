"""All-gather along the first dimension."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_gather


def solution(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return all_gather(x.contiguous(), 0, group)
