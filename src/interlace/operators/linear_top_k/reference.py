"""The choice as two steps of PyTorch: all ranks' logits, gathered, and ``topk`` of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from interlace.gemm.reference import gather_rows
from interlace.operators.linear_top_k.call import TopKCall


def choose(call: TopKCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest logits of each row, float32, and their columns, int64."""
    ranks, rows = call.group.world_size, len(call.x)
    logits = F.linear(call.x, call.w, call.bias)
    # Ranks may have fewer columns than others, and rows of padding.
    share = call.shard.per_rank
    logits = F.pad(logits[:, : call.shard.columns], (0, share - call.shard.columns))
    gathered = gather_rows(logits, [rows] * ranks, call.process_group)
    logits_of_all = gathered.view(ranks, rows, share).transpose(0, 1).reshape(rows, ranks * share)
    values, columns = logits_of_all[:, : call.vocabulary].topk(call.k, 1)
    return values.float(), columns
