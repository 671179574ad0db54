"""Gradients of attention over a sequence that is cut over one group; the mean over another."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.attention import gathered, scores_of
from benchmarks.parallel_kernel_bench.exchange import all_reduce, reduce_scatter, replayed


@replayed
@torch.no_grad()
def solution(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    softmax_lse: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
    cp_group: dist.ProcessGroup | None = None, dp_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keys, values = gathered(k, v, cp_group)
    scores = scores_of(q, keys, scale, causal, cp_group)
    probabilities = torch.exp(scores - softmax_lse[..., None].float())
    qh, kh, vh, dh, oh = (t.transpose(1, 2).float() for t in (q, keys, values, dout, out))
    d_scores = probabilities * (dh @ vh.mT - (dh * oh).sum(-1, keepdim=True)) * scale
    dq = d_scores @ kh
    # Keys' gradients by sequence first, so that each rank gets those of its part.
    dk, dv = (t.permute(2, 0, 1, 3) for t in (d_scores.mT @ qh, probabilities.mT @ dh))
    if dist.get_world_size(cp_group) > 1:
        dk, dv = (reduce_scatter(t.contiguous(), cp_group) for t in (dk, dv))
    grads = [dq.transpose(1, 2), dk.transpose(0, 1), dv.transpose(0, 1)]
    whole = torch.stack(grads).to(q.dtype)
    if dp_group is not None and dist.get_world_size(dp_group) > 1:
        whole = all_reduce(whole, dp_group) / dist.get_world_size(dp_group)
    return tuple(whole)
