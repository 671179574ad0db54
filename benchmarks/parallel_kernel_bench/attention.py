"""Attention over sequences that are cut over the ranks, for the solutions that share it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_gather


def gathered(
    k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v ``[batch, sequence, heads, width]`` of all ranks, in one exchange."""
    if dist.get_world_size(group) == 1:
        return k, v
    k, v = all_gather(torch.stack([k, v]), 2, group)
    return k, v


def scores_of(
    q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return ``[batch, heads, own sequence, whole sequence]``: float32, masked if causal."""
    scores = q.transpose(1, 2).float() @ k.permute(0, 2, 3, 1).float() * scale
    if causal:
        own, whole = scores.shape[-2:]
        row = torch.arange(own, device=q.device)[:, None] + dist.get_rank(group) * own
        scores = scores.masked_fill(torch.arange(whole, device=q.device) > row, float("-inf"))
    return scores


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:  # fmt: skip
    """Return the attention of this rank's queries to all ranks' keys: of q's shape and dtype."""
    k, v = gathered(k, v, group)
    scores = scores_of(q, k, q.shape[-1] ** -0.5 if scale is None else scale, causal, group)
    values = scores.softmax(-1) @ v.transpose(1, 2).float()
    return values.transpose(1, 2).to(q.dtype)


def attend_block(
    hidden: torch.Tensor, w_qkv: torch.Tensor, w_o: torch.Tensor, heads: int, scale: float | None,
    causal: bool, group: dist.ProcessGroup | None,
) -> torch.Tensor:  # fmt: skip
    """Return a layer's projections and its attention: ``[batch, sequence, hidden]``."""
    batch, length = hidden.shape[:2]
    qkv = (hidden @ w_qkv.T).view(batch, length, 3, heads, -1)
    context = attend(*qkv.unbind(2), scale, causal, group)
    return context.reshape(batch, length, -1) @ w_o.T
