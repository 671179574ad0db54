"""Hyena's long convolution, gated: sequences come together for a part of the channels each, and go
back, in two exchanges.
"""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_to_all, replayed


@replayed
@torch.no_grad()
def solution(
    x1_seq: torch.Tensor, x2_seq: torch.Tensor, v_seq: torch.Tensor, h: torch.Tensor,
    conv_bias: torch.Tensor, num_groups: int, group_dim: int,
    group: dist.ProcessGroup | None = None, with_zigzag_splitting: bool = True,
) -> torch.Tensor:  # fmt: skip
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    # Rank r has chunks number r and, in a zigzag, number r from the end.
    last = 2 * ranks - 1
    order = list(range(last + 1))
    if with_zigzag_splitting:
        order = [last - j // 2 if j % 2 else j // 2 for j in order]
    chunks = all_to_all(torch.stack([x1_seq, x2_seq, v_seq]), 2, 3, group).chunk(last + 1, 3)
    x1, x2, v = torch.cat([chunks[order.index(j)] for j in range(last + 1)], 3)
    u, n = (x2 * v).float(), 2 * x1.shape[-1]
    filters = h.chunk(ranks)[rank].repeat_interleave(group_dim, 0).float()
    spectrum = torch.fft.rfft(u, n) * (torch.fft.rfft(filters, n) / n)
    y = torch.fft.irfft(spectrum, n, norm="forward")[..., : n // 2]
    y = (y + u * conv_bias.chunk(ranks)[rank].float()[:, None]).to(x1.dtype)
    chunks = (x1 * y).chunk(last + 1, 2)
    parts = all_to_all(torch.cat([chunks[j] for j in order], 2), 2, 1, group)
    return parts.transpose(1, 2).contiguous()
