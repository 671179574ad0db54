"""Gather weights that are rounded to float8."""

import torch

from benchmarks.parallel_kernel_bench.exchange import all_gather, replayed


@replayed
@torch.no_grad()
def solution(
    flat_param_shard: torch.Tensor, amax_history: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    most = flat_param_shard.abs().max().to(amax_history.dtype)
    history = torch.cat([amax_history[1:], most[None]])
    scale = history.max().clamp(min=1e-12).float() / 448.0
    rounded = (flat_param_shard.float() / scale).to(torch.float8_e4m3fn).float() * scale
    return all_gather(rounded.to(flat_param_shard.dtype)), history
