"""A causal convolution of two chunks per rank, whose ends travel to the neighbours."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench.exchange import all_gather, replayed


@replayed
@torch.no_grad()
def solution(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = x.unflatten(2, (2, -1)).movedim(2, 0)
    ends = chunks[..., 1 - weight.shape[-1] :].contiguous()
    every = all_gather(ends[None], 0, group)
    # Rank r's chunks are number r, and number r from the end.
    before = every[rank - 1, 0] if rank else torch.zeros_like(ends[0])
    behind = every[rank + 1, 1] if rank < ranks - 1 else ends[0]
    padded = torch.cat([torch.stack([before, behind]), chunks], -1)
    y = F.conv1d(padded.flatten(0, 1), weight, groups=x.shape[1])
    return y.unflatten(0, (2, -1)).movedim(0, 2).flatten(2)
