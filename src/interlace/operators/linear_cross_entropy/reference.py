"""The loss as two steps of PyTorch: a product that stores all logits, and what Megatron and
PyTorch's ``loss_parallel`` do with them, by three all-reduces.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.gemm.reference import gather_rows, sum_rows
from interlace.operators.linear_cross_entropy.call import LossCall, LossGradients


def losses(call: LossCall) -> tuple[torch.Tensor, torch.Tensor, LossGradients]:
    """Return each row's loss and logarithm of the sum of exponentials, float32 ``[M]``, and the
    gradients that the call needs of their sum, times ``call.scale``.
    """
    x, logits = _logits(call)
    log_sum, probabilities = _softmax(call, logits)
    targets = call.target.long()
    is_counted = targets != call.options.ignore_index
    is_valid = (targets >= 0) & (targets < call.options.vocabulary)
    own_targets = targets - call.shard.first
    is_here = (own_targets >= 0) & (own_targets < logits.shape[1])
    index = torch.where(is_here, own_targets, 0)[:, None]
    chosen = torch.where(is_here, logits.gather(1, index)[:, 0], 0.0)
    sums = torch.stack([chosen, logits.sum(1)])
    _reduce(call, sums, dist.ReduceOp.SUM)
    smoothing, vocabulary = call.options.label_smoothing, call.options.vocabulary
    loss = log_sum - (1 - smoothing) * sums[0] - smoothing / vocabulary * sums[1]
    loss = loss + call.options.z_loss * log_sum.square()
    loss = torch.where(is_valid, loss, float("nan"))
    loss = torch.where(is_counted, loss, 0.0)
    if not call.is_differentiated:
        return loss, log_sum, LossGradients(None, None, None)
    return loss, log_sum, _gradients(call, x, probabilities, log_sum)


def gradients(call: LossCall, log_sum: torch.Tensor) -> LossGradients:
    """Return the gradients that the call needs of the rows' losses, each times its own of
    ``call.scale``.
    """
    x, logits = _logits(call)
    probabilities = torch.exp(logits - log_sum[:, None])
    return _gradients(call, x, probabilities, log_sum)


def _logits(call: LossCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of x of all ranks, and their logits in float32, in this rank's columns."""
    x, ranks = call.x, call.group.world_size
    if call.options.sequence_parallel:
        x = gather_rows(x, [len(x)] * ranks, call.process_group)
    columns = call.shard.columns
    bias = None if call.bias is None else call.bias[:columns]
    return x, F.linear(x, call.w[:columns], bias).float()


def _softmax(call: LossCall, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the sum of exponentials of each row, and this rank's columns of the
    softmax.
    """
    highest = logits.amax(1)
    _reduce(call, highest, dist.ReduceOp.MAX)
    exponentials = torch.exp(logits - highest[:, None])
    total = exponentials.sum(1)
    _reduce(call, total, dist.ReduceOp.SUM)
    return highest + total.log(), exponentials / total[:, None]


def _gradients(
    call: LossCall,
    x: torch.Tensor,
    probabilities: torch.Tensor,
    log_sum: torch.Tensor,
) -> LossGradients:
    """Return the gradients that the call needs, of the softmax in this rank's columns."""
    smoothing, targets = call.options.label_smoothing, call.target.long()
    is_valid = (targets >= 0) & (targets < call.options.vocabulary)
    scale = torch.where(is_valid, call.scale.expand_as(log_sum), float("nan"))
    grad = probabilities * (1 + 2 * call.options.z_loss * log_sum)[:, None]
    grad -= smoothing / call.options.vocabulary
    own_targets = targets - call.shard.first
    columns = torch.arange(probabilities.shape[1], device=own_targets.device)
    grad = torch.where(columns == own_targets[:, None], grad - (1 - smoothing), grad)
    is_counted = targets != call.options.ignore_index
    grad = torch.where(is_counted[:, None], grad * scale[:, None], 0.0).to(x.dtype)
    return LossGradients(
        _of_x(call, grad @ call.w[: grad.shape[1]]) if call.needs_x else None,
        _padded(call, grad.T @ x) if call.needs_w else None,
        _padded(call, grad.float().sum(0).to(x.dtype)) if call.needs_bias else None,
    )


def _of_x(call: LossCall, part: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks of x's gradient, of this rank's rows where x has those alone."""
    if call.options.sequence_parallel:
        return sum_rows(part, [len(call.x)] * call.group.world_size, call.process_group)
    _reduce(call, part, dist.ReduceOp.SUM)
    return part


def _padded(call: LossCall, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient with rows of 0 for those of w that are behind the vocabulary."""
    padding = len(call.w) - len(grad)
    return torch.cat([grad, grad.new_zeros(padding, *grad.shape[1:])]) if padding else grad


def _reduce(call: LossCall, values: torch.Tensor, how: dist.ReduceOp.RedOpType) -> None:
    if call.group.world_size > 1:
        dist.all_reduce(values, how, group=call.process_group)
