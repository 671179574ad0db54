"""Kimi's delta attention over a sequence that is cut over the ranks: each works on a part of the
heads, and nothing is computed twice.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench.delta import delta_rule
from benchmarks.parallel_kernel_bench.exchange import all_reduce, all_to_all, replayed


@replayed
@torch.no_grad()
def solution(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    a_log: torch.Tensor, dt_bias: torch.Tensor, cp_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    ranks, rank, keys = dist.get_world_size(cp_group), dist.get_rank(cp_group), q.shape[-1]
    parts = torch.cat([q, k, v, g, beta[..., None]], -1)
    parts = all_to_all(parts, 2, 1, cp_group) if ranks > 1 else parts
    q, k, v, g, beta = parts.float().split([keys, keys, v.shape[-1], keys, 1], -1)
    scale = a_log.float().exp().chunk(ranks)[rank][:, None]
    bias = dt_bias.float().view(-1, keys).chunk(ranks)[rank]
    decay = torch.exp(-5.0 * torch.sigmoid(scale * (g + bias)))
    q, k = F.normalize(q, dim=-1) * keys**-0.5, F.normalize(k, dim=-1)
    y = delta_rule(q, k, v, decay, beta[..., 0].sigmoid()).to(parts.dtype).contiguous()
    y = all_to_all(y, 1, 2, cp_group) if ranks > 1 else y
    is_summed = tp_group is not None and dist.get_world_size(tp_group) > 1
    return all_reduce(y, tp_group) if is_summed else y
