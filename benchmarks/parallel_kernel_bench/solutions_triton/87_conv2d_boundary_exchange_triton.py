"""A convolution of an image whose rows are cut over the ranks; edges travel to the neighbours."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench.exchange import all_gather, replayed


@replayed
@torch.no_grad()
def solution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int = 1,
    padding: int = 1, group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if padding == 0 or ranks == 1:
        return F.conv2d(x, weight, bias, stride, padding)
    edges = torch.stack([x[:, :, :padding], x[:, :, -padding:]])
    every = all_gather(edges[None], 0, group)
    above = every[rank - 1, 1] if rank else torch.zeros_like(edges[0])
    below = every[rank + 1, 0] if rank < ranks - 1 else torch.zeros_like(edges[0])
    return F.conv2d(torch.cat([above, x, below], 2), weight, bias, stride, (0, padding))
