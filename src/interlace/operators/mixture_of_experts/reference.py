"""``mixture_of_experts`` in steps of torch: the unfused operator that the fused kernels are checked
against.
"""

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
    """Sort, all-to-all, each expert by itself, all-to-all, weighted sum; differentiable. Waits for
    the device.
    """
    local = w_in.shape[0]
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if ranks > 1 else 0
    chosen = experts.reshape(-1)
    slots = [(chosen == expert).nonzero()[:capacity, 0] for expert in range(ranks * local)]
    order = torch.cat(slots)
    counts = torch.tensor([len(each) for each in slots], device=x.device)
    of_ranks = [counts]
    if ranks > 1:
        of_ranks = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(of_ranks, counts, group=group)
    # [source][local expert]
    mine = [each[rank * local : (rank + 1) * local].tolist() for each in of_ranks]
    sent, arriving = counts.view(ranks, local).sum(1).tolist(), [sum(each) for each in mine]
    received = _exchange(x[order // experts.shape[1]], arriving, sent, group, ranks)
    owner = torch.cat(
        [torch.full((count,), expert) for each in mine for expert, count in enumerate(each)]
    ).to(x.device)
    results = torch.zeros_like(received)
    for expert in range(local):
        here = (owner == expert).nonzero()[:, 0]
        gate, up = (
            F.linear(received[here], w_in[expert, :, 0]),
            F.linear(received[here], w_in[expert, :, 1]),
        )
        results = results.index_copy(0, here, F.linear(F.silu(gate) * up, w_out[expert]))
    returned = _exchange(results, sent, arriving, group, ranks)
    rows = returned.new_zeros(experts.numel(), x.shape[1]).index_copy(0, order, returned)
    return (rows.view(*experts.shape, x.shape[1]).float() * weights[..., None]).sum(1).to(x.dtype)


def _exchange(
    rows: torch.Tensor, arriving: list[int], sent: list[int], group: Any, ranks: int
) -> torch.Tensor:
    if ranks == 1:
        return rows
    exchanged: torch.Tensor = _AllToAll.apply(rows, arriving, sent, group)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, arriving: list[int], sent: list[int], group: Any
    ) -> torch.Tensor:
        ctx.how = sent, arriving, group
        received = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), arriving, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, arriving, group = ctx.how
        (grad,) = grads
        returned = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(returned, grad.contiguous(), sent, arriving, group=group)
        return returned, None, None, None
