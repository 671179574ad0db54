"""``mixture_of_experts`` in steps of torch, which the fused kernels are checked against."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def mixture_of_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    capacity: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Sort, all-to-all, one expert after another, all-to-all, weighted sum.

    It is differentiable, and the host waits for the device.
    """
    local = w_in.shape[0]
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if ranks > 1 else 0
    chosen = experts.reshape(-1)
    # Slots beyond the capacity are dropped by token and then by j, as the kernels drop them.
    slots = [(chosen == expert).nonzero()[:capacity, 0] for expert in range(ranks * local)]
    order = torch.cat(slots)
    counts = torch.tensor([len(part) for part in slots], device=x.device)
    of_ranks = [counts]
    if ranks > 1:
        of_ranks = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(of_ranks, counts, group=group)
    # [source][local expert]
    own_counts = [part[rank * local : (rank + 1) * local].tolist() for part in of_ranks]
    sent, arriving = counts.view(ranks, local).sum(1).tolist(), [sum(part) for part in own_counts]
    received = _exchange(x[order // experts.shape[1]], arriving, sent, group, ranks)
    # Rows arrive by source, and those of a source by expert.
    owner = torch.cat(
        [torch.full((count,), expert) for part in own_counts for expert, count in enumerate(part)]
    ).to(x.device)
    results = torch.zeros_like(received)
    # Experts one by one, obviously right; index_copy lets gradients through.
    for expert in range(local):
        rows_of_expert = (owner == expert).nonzero()[:, 0]
        gate = F.linear(received[rows_of_expert], w_in[expert, :, 0])
        up = F.linear(received[rows_of_expert], w_in[expert, :, 1])
        results = results.index_copy(0, rows_of_expert, F.linear(F.silu(gate) * up, w_out[expert]))
    returned = _exchange(results, sent, arriving, group, ranks)
    rows = returned.new_zeros(experts.numel(), x.shape[1]).index_copy(0, order, returned)
    return (rows.view(*experts.shape, x.shape[1]).float() * weights[..., None]).sum(1).to(x.dtype)


def _exchange(
    rows: torch.Tensor, arriving: list[int], sent: list[int], group: Any, ranks: int
) -> torch.Tensor:
    if ranks == 1:
        return rows
    exchanged: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        rows, arriving, sent, group
    )
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Send rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, arriving: list[int], sent: list[int], group: Any
    ) -> torch.Tensor:
        ctx.splits = sent, arriving, group
        received = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), arriving, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, arriving, group = ctx.splits
        (grad,) = grads
        returned = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(returned, grad.contiguous(), sent, arriving, group=group)
        return returned, None, None, None
