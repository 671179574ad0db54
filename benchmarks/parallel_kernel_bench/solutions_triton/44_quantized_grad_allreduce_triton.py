"""Mean of gradients over the ranks: int8 codes and a scale per block travel, a quarter of the
bytes of float32.
"""

import torch
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench.exchange import all_gather, replayed


@replayed
@torch.no_grad()
def solution(flat_grad: torch.Tensor, block_size: int) -> torch.Tensor:
    flat = flat_grad.flatten()
    blocks = F.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    scales = blocks.abs().amax(1).float().clamp(min=1e-8) / 127.0
    codes = (blocks.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
    codes, scales = all_gather(codes[None]), all_gather(scales[None])
    mean = (codes * scales[:, :, None]).mean(0)
    return mean.flatten()[: flat.numel()].to(flat_grad.dtype).view(flat_grad.shape)
