"""What sampling keeps of logits, for the solutions that share it."""

from __future__ import annotations

import torch


def filtered(logits: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """Return logits ``[tokens, vocabulary]`` with -inf for what top-k and top-p leave out.

    Logits as large as the k-th are kept, and at least one. Of the kept ones, sorted upwards, those
    are left out whose probabilities add up to at most ``1 - top_p``.
    """
    ordered, index = logits.sort(-1)
    if top_k is not None and top_k > 0:
        k = min(int(top_k), logits.shape[-1])
        ordered = ordered.masked_fill(ordered < ordered[:, -k, None], float("-inf"))
    if top_p < 1.0:
        left_out = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        left_out[:, -1] = False
        ordered = ordered.masked_fill(left_out, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, index, ordered)
