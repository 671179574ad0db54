"""Gated delta network: sequences come together for a part of the heads each, and go back."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench.delta import delta_rule
from benchmarks.parallel_kernel_bench.exchange import all_to_all, replayed


@replayed
@torch.no_grad()
def solution(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor,
    a_log: torch.Tensor, dt_bias: torch.Tensor, group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    keys, values, repeat = q.shape[-1], v.shape[-1], v.shape[2] // q.shape[2]
    q, k = (t.repeat_interleave(repeat, 2) for t in (q, k))
    parts = torch.cat([q, k, v, gate[..., None], beta[..., None]], -1)
    parts = all_to_all(parts, 2, 1, group)
    q, k, v, gate, beta = parts.float().split([keys, keys, values, 1, 1], -1)
    decay = -a_log.float().exp() * F.softplus(gate[..., 0] + dt_bias.float())
    q, k = (F.normalize(t, dim=-1, eps=1e-6) for t in (q, k))
    y = delta_rule(q * keys**-0.5, k, v, decay.exp(), beta[..., 0])
    return all_to_all(y.to(parts.dtype).contiguous(), 1, 2, group)
