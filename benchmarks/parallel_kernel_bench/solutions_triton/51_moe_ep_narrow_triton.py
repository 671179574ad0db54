"""A layer of experts with fewer experts than ranks: groups of as many ranks work by themselves."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace


@functools.cache
def _group(size: int) -> dist.ProcessGroup:
    ranks = dist.get_world_size()
    groups = [dist.new_group(range(i, i + size)) for i in range(0, ranks, size)]
    return groups[dist.get_rank() // size]


@torch.no_grad()
def solution(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, gate_bias: torch.Tensor | None,
    gate_proj: torch.nn.Linear, up_proj: torch.nn.Linear, down_proj: torch.nn.Linear,
    num_experts: int, top_k: int, group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    router = torch.softmax(F.linear(x, gate_weight, gate_bias), -1)
    weights, experts = torch.topk(router, top_k, -1)
    if num_experts == 1:  # one rank is a group, and nothing travels
        inner = F.silu(gate_proj(x)) * up_proj(x)
        return down_proj(inner) * weights
    w_in = torch.stack([gate_proj.weight, up_proj.weight])[None].transpose(1, 2)
    b_in = torch.stack([gate_proj.bias, up_proj.bias], 1)[None]
    return interlace.mixture_of_experts(
        x, experts, weights, w_in, down_proj.weight[None], b_in, down_proj.bias[None],
        group=group or _group(min(num_experts, dist.get_world_size())),
    )  # fmt: skip
