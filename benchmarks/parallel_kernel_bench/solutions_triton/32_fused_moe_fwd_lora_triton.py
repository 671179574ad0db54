"""A layer of experts with adapters. All experts of a rank share them here, so rows only go to
ranks, in any order.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear

from benchmarks.parallel_kernel_bench.exchange import all_gather, exchange_rows


def _adapted(x: Tensor, layer: Linear, a: Tensor, b: Tensor) -> Tensor:
    return layer(x) + F.linear(F.linear(x, a), b)


@torch.no_grad()
def solution(
    hidden_states: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, gate_proj: Linear,
    up_proj: Linear, down_proj: Linear, lora_gate_A: Tensor, lora_gate_B: Tensor,
    lora_up_A: Tensor, lora_up_B: Tensor, lora_down_A: Tensor, lora_down_B: Tensor,
    num_experts: int, top_k: int, group: dist.ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    x, ranks = hidden_states.reshape(-1, hidden_states.shape[-1]), dist.get_world_size(group)
    router = torch.softmax(F.linear(x, gate_weight, gate_bias), -1)
    weights, experts = torch.topk(router, top_k, -1)
    owner, slot = torch.sort((experts // (num_experts // ranks)).flatten(), stable=True)
    sent = (owner == torch.arange(ranks, device=x.device)[:, None]).sum(1)
    counts = all_gather(sent[None], 0, group).tolist()  # the host waits here
    here, most = [row[dist.get_rank(group)] for row in counts], len(slot)
    there = counts[dist.get_rank(group)]
    rows = exchange_rows(x, there, here, most, take=slot // top_k, group=group)
    gate = F.silu(_adapted(rows, gate_proj, lora_gate_A, lora_gate_B))
    inner = gate * _adapted(rows, up_proj, lora_up_A, lora_up_B)
    rows = _adapted(inner, down_proj, lora_down_A, lora_down_B)
    rows = exchange_rows(rows, here, there, most, place=slot, group=group)
    return (rows.view(-1, top_k, x.shape[1]) * weights[..., None]).sum(1)
