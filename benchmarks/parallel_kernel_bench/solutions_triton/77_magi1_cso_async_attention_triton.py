"""Attention of ranges of tokens: keys, values and queries of all ranges come together for a part of
the heads, and go back, in three exchanges.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench.exchange import all_to_all


@torch.no_grad()
def solution(
    query: torch.Tensor, key_value: torch.Tensor, k_ranges: torch.Tensor, cp_shuffle_num: int,
    clip_token_nums: int | None = None, group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    width, copies = query.shape[-1], dist.get_world_size(group) // key_value.shape[1]
    if copies > 1:
        key_value = key_value.repeat_interleave(copies, 1)
    kv, q = (
        all_to_all(t.contiguous().unflatten(0, (cp_shuffle_num, -1)), 2, 1, group)
        for t in (key_value, query)
    )
    tokens = kv.shape[1] if clip_token_nums is None else clip_token_nums
    k, v = kv[:, :tokens].flatten(0, 1).transpose(0, 1)[None].split(width, -1)
    out = torch.empty_like(q)
    for part, y, (begin, end) in zip(q, out, k_ranges.tolist(), strict=True):
        y.copy_(F.scaled_dot_product_attention(
            part.transpose(0, 1)[None], k[:, :, begin:end], v[:, :, begin:end], enable_gqa=True
        )[0].transpose(0, 1))  # fmt: skip
    return all_to_all(out, 1, 2, group).flatten(0, 1)
