"""Quality of a click model over all ranks: cross entropy and the area under the ROC curve."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.comm import rank_and_size
from interlace.errors import ArgumentError


def binary_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``-log p(label)`` with ``p(1) = sigmoid(logit)``: a scalar, in nats.

    It is 0 without samples, so that a rank whose part of a batch is empty does not spoil the loss.

    Args:
        logits: ``[n]``, of a floating-point dtype.
        labels: ``[n]``, 0 or 1, of the dtype of ``logits``.
    """
    total = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return total / max(1, labels.numel())


def area_under_roc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the probability that a positive sample's score is above a negative sample's.

    Equal scores count one half. The result is exact, in ``n log n``: ``(sum of the positives' ranks
    - P (P + 1) / 2) / (P N)`` with P positives and N negatives, where equal scores share the mean
    of their ranks (Mann and Whitney's U). NaN if there are only positives or only negatives.

    Args:
        scores: ``[n]``, of any real dtype; higher means likelier.
        labels: ``[n]``, 0 or 1.

    Raises:
        ArgumentError: shapes differ, or a score is NaN.

    Example:
        >>> area_under_roc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        0.75
    """
    if scores.shape != labels.shape or scores.dim() != 1:
        raise ArgumentError(
            f"area_under_roc: scores and labels must be 1-D and alike; got {list(scores.shape)} "
            f"and {list(labels.shape)}."
        )
    if bool(scores.isnan().any()):
        raise ArgumentError("area_under_roc: scores must be numbers; got NaN.")
    _, group, count = torch.unique(scores, sorted=True, return_inverse=True, return_counts=True)
    last = count.cumsum(0)
    # In float64, because float32 cannot hold the ranks of more than 2**24 samples.
    mean_rank = last.double() - (count.double() - 1) / 2
    positive = labels > 0.5
    positives = int(positive.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    total = mean_rank[group[positive]].sum()
    return float((total - positives * (positives + 1) / 2) / (positives * negatives))


def gather_rows(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Gather all ranks' rows, in rank order, on every rank. Collective.

    Args:
        values: ``[n_r, ...]``; ranks may have different numbers of rows.
        group: Process group; default: the default one.

    Returns:
        ``[sum of n_r, ...]``.
    """
    _, ranks = rank_and_size(group)
    if ranks == 1:
        return values
    counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([len(values)], device=values.device), group=group)
    sizes = [int(count) for count in counts]
    # All-gather takes tensors of one shape, so every rank's rows are padded to the most rows.
    padded = values.new_zeros(max(sizes), *values.shape[1:])
    padded[: len(values)] = values
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])
