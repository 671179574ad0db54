"""A loss over the tokens of all ranks, and its gradient, without waiting for the counts."""

import torch

from benchmarks.parallel_kernel_bench.exchange import all_reduce, replayed


@replayed
def solution(
    loss: torch.Tensor, local_valid_tokens: torch.Tensor, global_valid_tokens: torch.Tensor,
    grad_normalized_loss: torch.Tensor, grad_loss_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    tokens = local_valid_tokens
    loss_sum = all_reduce(torch.where(tokens == 0, torch.nan_to_num(loss), loss) * tokens)
    grad = grad_normalized_loss * tokens / global_valid_tokens
    if grad_loss_sum is not None:
        grad = grad + grad_loss_sum * tokens
    return loss_sum / global_valid_tokens, loss_sum, grad
