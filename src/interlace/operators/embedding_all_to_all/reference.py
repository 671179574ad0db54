"""Pooling in plain steps of torch, in the tables' own dtype, which the tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pool(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    mode: str,
    batch: int,
) -> list[torch.Tensor]:
    """Pool each table for every sample: ``[batch, width]``, in the tables' dtype; differentiable.

    Args:
        tables: Tables of one rank, float32 or float64, each ``[rows, width]``.
        indices: ``[lookups]``.
        offsets: ``[tables * batch + 1]``, the first lookup of each bag.
        scale: ``[lookups]``, factors of the rows; None for 1.
        mode: ``"sum"`` or ``"mean"``.
        batch: Number of samples.
    """
    pooled = []
    for number, table in enumerate(tables):
        bounds = offsets[number * batch : (number + 1) * batch + 1].long()
        lengths, part = bounds.diff(), slice(int(bounds[0]), int(bounds[-1]))
        rows = table[indices[part].long()]
        if scale is not None:
            rows = rows * scale[part, None].to(table.dtype)
        bags = torch.arange(batch).repeat_interleave(lengths)
        sums = table.new_zeros(batch, table.shape[1]).index_add(0, bags, rows)
        pooled.append(sums / lengths.clamp(min=1)[:, None] if mode == "mean" else sums)
    return pooled
