"""A gated MLP whose weights are cut two ways: gathered over one group, summed over the other."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.parallel_kernel_bench.exchange import add, all_gather


@functools.cache
def _groups(n_tp: int, n_fsdp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    ranks = torch.arange(n_tp * n_fsdp).view(n_fsdp, n_tp)
    tp = [dist.new_group(row) for row in ranks.tolist()]
    fsdp = [dist.new_group(column) for column in ranks.T.tolist()]
    return tp[dist.get_rank() // n_tp], fsdp[dist.get_rank() % n_tp]


@torch.no_grad()
def solution(
    x_local: Tensor, W1_shard: Tensor, W2_shard: Tensor, W3_shard: Tensor, n_tp: int, n_fsdp: int
) -> Tensor:
    tp, fsdp = _groups(n_tp, n_fsdp)
    w1, w2 = (all_gather(shard, 0, fsdp) for shard in (W1_shard, W2_shard))
    y = (F.silu(x_local @ w1) * (x_local @ w2)) @ all_gather(W3_shard, 1, fsdp)
    return add(y, y, group=tp) if n_tp > 1 else y
