"""Sum the gradients of three adapters, in place."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import add


def solution(
    grad_fc1_1_lora_A: torch.Tensor, grad_fc1_2_lora_A: torch.Tensor,
    grad_fc2_lora_B: torch.Tensor, group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    grads = grad_fc1_1_lora_A, grad_fc1_2_lora_A, grad_fc2_lora_B
    return tuple(add(grad, grad, group=group) for grad in grads)
