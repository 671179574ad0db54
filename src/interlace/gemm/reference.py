"""Products and their collectives in steps of torch, for the operators' references. Nothing of a
kernel is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Factors(NamedTuple):
    """The operands of a product: ``x [M, K]``, ``w [N, K]``, ``bias [N]``, the scales of float8
    (``[M]`` and ``[N]``, or one element), and the dtype of the result.
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    x_scale: torch.Tensor | None
    w_scale: torch.Tensor | None
    out_dtype: torch.dtype


def product(factors: Factors) -> torch.Tensor:
    """Return ``x @ w.T + bias`` in ``out_dtype``; float8 is dequantised to float32 first."""
    x, w, bias, x_scale, w_scale, out_dtype = factors
    if x.dtype == out_dtype:
        return F.linear(x, w, bias)
    wide_x, wide_w = x.float(), w.float()
    if x_scale is not None and w_scale is not None:
        wide_x, wide_w = wide_x * x_scale.reshape(-1, 1), wide_w * w_scale.reshape(-1, 1)
    return F.linear(wide_x, wide_w, None if bias is None else bias.float()).to(out_dtype)


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Return whether there is no other rank to communicate with."""
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def exchange_rows(
    rows: torch.Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Run an all-to-all: ``input_splits[d]`` rows go to rank d, ``output_splits[s]`` rows come from
    rank s.
    """
    if is_alone(group):
        return rows
    received = rows.new_empty(sum(output_splits), rows.shape[1])
    dist.all_to_all_single(
        received, rows.contiguous(), list(output_splits), list(input_splits), group=group
    )
    return received


def sum_rows(
    parts: torch.Tensor, splits: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Reduce-scatter: this rank's ``splits[rank]`` rows of the sum of all ranks' ``parts``."""
    if is_alone(group):
        return parts
    received = parts.new_empty(splits[dist.get_rank(group)], parts.shape[1])
    if len(set(splits)) == 1:
        # Named reduce_scatter_single since torch 2.13, which warns of the older name.
        single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        single(received, parts, group=group)
    else:
        dist.reduce_scatter(received, list(parts.split(list(splits))), group=group)
    return received


def gather_rows(
    rows: torch.Tensor, splits: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """All-gather: all ranks' rows, rank r's ``splits[r]`` after rank r - 1's."""
    if is_alone(group):
        return rows
    gathered = rows.new_empty(sum(splits), *rows.shape[1:])
    if not gathered.numel():
        return gathered
    # Bytes: not every backend knows float8.
    sent, received = (
        t.view(torch.uint8) if t.element_size() == 1 else t for t in (rows.contiguous(), gathered)
    )
    if len(set(splits)) == 1:
        single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        single(received, sent, group=group)
    else:
        for rank, part in enumerate(received.split(list(splits))):
            if rank == dist.get_rank(group):
                part.copy_(sent)
            if splits[rank]:
                dist.broadcast(part, group=group, group_src=rank)
    return gathered
