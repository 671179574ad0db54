"""A layer of experts, for the solutions that differ in the number of experts alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace


@torch.no_grad()
def experts_of_ranks(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, gate_bias: torch.Tensor | None,
    gate_proj: torch.nn.Linear, up_proj: torch.nn.Linear, down_proj: torch.nn.Linear,
    num_experts: int, top_k: int, group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the sum of each token's experts.

    All experts of a rank share one MLP here, so a rank is one expert, and a token's weights for the
    experts of one rank are added.
    """
    x, ranks = hidden_states.reshape(-1, hidden_states.shape[-1]), dist.get_world_size(group)
    router = torch.softmax(F.linear(x, gate_weight, gate_bias), -1)
    weights, experts = torch.topk(router, top_k, -1)
    by_rank = weights.new_zeros(len(x), ranks)
    by_rank.scatter_add_(1, experts // (num_experts // ranks), weights)
    rank = torch.where(by_rank > 0, torch.arange(ranks, device=x.device), -1)
    w_in = torch.stack([gate_proj.weight, up_proj.weight])[None].transpose(1, 2)
    b_in = torch.stack([gate_proj.bias, up_proj.bias], 1)[None]
    return interlace.mixture_of_experts(
        x, rank, by_rank, w_in, down_proj.weight[None], b_in, down_proj.bias[None], group=group
    )  # fmt: skip
