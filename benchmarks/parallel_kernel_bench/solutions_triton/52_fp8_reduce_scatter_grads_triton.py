"""Mean over the ranks of gradients that were rounded to float8."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import reduce_scatter, replayed


@replayed
@torch.no_grad()
def solution(
    flat_grads: torch.Tensor, amax_history: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    most = flat_grads.abs().max().to(amax_history.dtype)
    history = torch.cat([amax_history[1:], most[None]])
    scale = history.max().clamp(min=1e-12).float() / 448.0
    rounded = (flat_grads.float() / scale).to(torch.float8_e4m3fn).float() * scale
    return reduce_scatter(rounded.to(flat_grads.dtype)) / dist.get_world_size(), history
