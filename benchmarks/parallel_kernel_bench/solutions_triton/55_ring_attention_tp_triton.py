"""Attention over a sequence that is cut over one group, with heads cut over another."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.attention import attend_block
from benchmarks.parallel_kernel_bench.exchange import add, replayed


@replayed
@torch.no_grad()
def solution(
    hidden_states: torch.Tensor, w_qkv: torch.Tensor, w_o: torch.Tensor, num_heads: int,
    softmax_scale: float | None = None, causal: bool = False,
    tp_group: dist.ProcessGroup | None = None, cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    heads = num_heads // dist.get_world_size(tp_group)
    y = attend_block(hidden_states, w_qkv, w_o, heads, softmax_scale, causal, cp_group)
    return add(y, y, group=tp_group) if heads < num_heads else y
