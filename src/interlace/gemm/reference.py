"""Products and their collectives in steps of torch, for the operators' references. Nothing of a
kernel is used here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.comm.groups.process_groups import gather, require_alone, scatter
from interlace.gemm import scaled
from interlace.gemm.operands import Operands


def product(operands: Operands) -> torch.Tensor:
    """Return ``x @ w.T + bias`` in ``out_dtype``.

    Float8 operands are multiplied by cuBLAS on a GPU, which is what a program without Interlace
    runs; what that does not take is dequantised to float32 first.
    """
    x, w, bias, out_dtype = operands.x, operands.w, operands.bias, operands.out_dtype
    x_scale, w_scale = operands.x_scale, operands.w_scale
    if x.dtype == out_dtype:
        return F.linear(x, w, bias)
    wide_x, wide_w = x, w
    if x_scale is not None and w_scale is not None:
        x, w = x.contiguous(), w.contiguous()
        y = x.new_empty([len(x), len(w)], dtype=out_dtype)
        if scaled.multiply_into(y, x, w, x_scale, w_scale, bias):
            return y
        wide_x = scaled.dequantised(x, x_scale, 1)
        wide_w = scaled.dequantised(w, w_scale, scaled.SCALE_BLOCK)
    wide_bias = None if bias is None else bias.float()
    return F.linear(wide_x.float(), wide_w.float(), wide_bias).to(out_dtype)


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Return whether there is no other rank to communicate with.

    Raises:
        GroupError: There is no process group, in one of several processes.
    """
    if dist.is_initialized():
        return dist.get_world_size(group) == 1
    require_alone()
    return True


def exchange_rows(
    rows: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Run an all-to-all: ``input_splits[d]`` rows go to rank d, ``output_splits[s]`` rows come from
    rank s; without lists, as many to and from each.
    """
    if is_alone(group):
        return rows
    if input_splits is None or output_splits is None:
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received
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
        scatter(received, parts, group)
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
        gather(received, sent, group)
    else:
        for rank, part in enumerate(received.split(list(splits))):
            if rank == dist.get_rank(group):
                part.copy_(sent)
            if splits[rank]:
                dist.broadcast(part, group=group, group_src=rank)
    return gathered
