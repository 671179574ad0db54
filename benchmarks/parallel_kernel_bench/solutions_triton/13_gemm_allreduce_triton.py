"""The product, and one launch for the sum.

``interlace.gemm_all_reduce`` is one launch for both; for 1024 x 1024 its host time decides.
"""

import torch

from benchmarks.parallel_kernel_bench.exchange import add


@torch.no_grad()
def solution(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    y = torch.mm(A_local, B_local)
    return add(y, y)
