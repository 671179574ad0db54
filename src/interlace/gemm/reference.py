"""Products and their collectives in steps of torch, for the operators' references. Nothing of a
kernel is used here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.comm.groups.process_groups import gather, require_alone, scatter
from interlace.gemm.operands import Operands

_SCALED_ALIGNMENT = 16
"""``torch._scaled_mm`` takes N and K that are multiples of this."""


def product(operands: Operands) -> torch.Tensor:
    """Return ``x @ w.T + bias`` in ``out_dtype``.

    Float8 operands are multiplied by ``torch._scaled_mm`` on a GPU, which is what a program without
    Interlace runs; where it does not take them, they are dequantised to float32 first.
    """
    x, w, bias, out_dtype = operands.x, operands.w, operands.bias, operands.out_dtype
    x_scale, w_scale = operands.x_scale, operands.w_scale
    if x.dtype == out_dtype:
        return F.linear(x, w, bias)
    if _takes_scaled(operands):
        return _scaled_product(operands)
    wide_x, wide_w = x.float(), w.float()
    if x_scale is not None and w_scale is not None:
        wide_x, wide_w = wide_x * x_scale.reshape(-1, 1), wide_w * w_scale.reshape(-1, 1)
    return F.linear(wide_x, wide_w, None if bias is None else bias.float()).to(out_dtype)


def _takes_scaled(operands: Operands) -> bool:
    """Return whether ``torch._scaled_mm`` takes a product."""
    x, w, x_scale, w_scale = operands.x, operands.w, operands.x_scale, operands.w_scale
    return (
        x.is_cuda
        and x.itemsize == 1
        and x_scale is not None
        and w_scale is not None
        and len(x) > 0
        # Its results with a scale for each row are bfloat16, and it adds no float32 bias.
        and (
            operands.out_dtype == torch.bfloat16
            or (x_scale.numel() == w_scale.numel() == 1 and operands.bias is None)
        )
        and w.shape[0] % _SCALED_ALIGNMENT == w.shape[1] % _SCALED_ALIGNMENT == 0
    )


def _scaled_product(operands: Operands) -> torch.Tensor:
    x, w, x_scale, w_scale = operands.x, operands.w, operands.x_scale, operands.w_scale
    assert x_scale is not None
    assert w_scale is not None
    if x_scale.numel() == w_scale.numel() == 1:
        x_scale, w_scale = x_scale.reshape(()), w_scale.reshape(())
    else:
        x_scale = x_scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
        w_scale = w_scale.reshape(1, -1).expand(1, w.shape[0]).contiguous()
    # The left operand must be row-major, the right one column-major.
    y: torch.Tensor = torch._scaled_mm(
        x.contiguous(),
        w.contiguous().T,
        x_scale,
        w_scale,
        bias=operands.bias,
        out_dtype=operands.out_dtype,
    )
    return y


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
