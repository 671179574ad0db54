"""Sort numbers of all ranks: all are gathered and sorted once per rank, which is quicker than to
split them as long as they are few.
"""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_gather, exchange_rows


@torch.no_grad()
def solution(local_shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    size = torch.full((1,), local_shard.numel(), device=local_shard.device)
    sizes = all_gather(size, 0, group).tolist()
    sent, starts = [local_shard.numel()] * len(sizes), [0] * len(sizes)
    every = exchange_rows(local_shard, sent, sizes, max(sizes), starts=starts, group=group)
    return every.sort().values.tensor_split(len(sizes))[dist.get_rank(group)]
