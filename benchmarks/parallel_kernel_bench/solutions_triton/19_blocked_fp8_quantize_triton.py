"""Quantise blocks to float8, and gather codes and scales."""

import torch

from benchmarks.parallel_kernel_bench.exchange import all_gather, replayed


@replayed
def solution(
    local_tensor: torch.Tensor, block_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = local_tensor.unflatten(-1, (-1, block_size)).float()
    scales = blocks.abs().amax(-1) / 448.0
    codes = blocks / torch.where(scales == 0, 1.0, scales)[..., None]
    codes = codes.flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8)
    return all_gather(codes, 0).view(torch.float8_e4m3fn), all_gather(scales, 0)
