"""Clip gradients by the norm over all ranks; those of experts are summed over other groups."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_reduce, replayed


def _powers(grads: list[torch.Tensor], p: float, *groups: dist.ProcessGroup | None) -> torch.Tensor:
    total = torch.stack(torch._foreach_norm(grads, p, torch.float32)).pow(p).sum()
    for group in groups:
        total = total if group is None else all_reduce(total, group)
    return total


@replayed
def solution(
    non_ep_grad_tensors: list[torch.Tensor], ep_grad_tensors: list[torch.Tensor], max_norm: float,
    norm_type: float = 2.0, ep_size: int = 1, fsdp_group: dist.ProcessGroup | None = None,
    ep_fsdp_group: dist.ProcessGroup | None = None, ep_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    others, experts = (
        [grad for grad in grads if grad is not None]
        for grads in (non_ep_grad_tensors, ep_grad_tensors)
    )
    if ep_size > 1 and experts:
        torch._foreach_mul_(experts, 1.0 / ep_size)
    total = _powers(others, norm_type, fsdp_group)
    total = (total + _powers(experts, norm_type, ep_fsdp_group, ep_group)) ** (1.0 / norm_type)
    torch._foreach_mul_(others + experts, (max_norm / total).clamp(max=1.0))
    return total
