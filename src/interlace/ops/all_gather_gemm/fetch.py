"""Copy engines that fetch the peers' rows while the product works on those that are here; README.md explains the protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from interlace.comm import Group, copies
from interlace.comm.group import Workspace
from interlace.comm.kernels import Launch
from interlace.ops.all_gather_gemm.config import OPERATOR, AllGatherGemmConfig
from interlace.products import record
from interlace.products.launch import row_stride
from interlace.products.operands import ALIGNMENT_BYTES, Operands
from interlace.units import ceil_div, round_up

_STAGERS = 264  # programs that stage rows: two a processor of an H200, more would only be launched


def scale_offset(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from rows ``[*shape]`` to their scales."""
    return round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT_BYTES)


def per_source(workspace: Workspace, ranks: int) -> int:
    """Signals of one rank's blocks of rows; as many more serve as counters."""
    return (workspace.signal_count - record.HEADER) // (ranks + 1)


def workspace_for(group: Group, splits: Sequence[int], whole: torch.Tensor, config: AllGatherGemmConfig) -> Workspace:
    """Where a rank's rows lie for its peers, in both halves: who fetches must know the address before the epoch.

    Collective when it must grow.
    """
    rows = max(splits)
    nbytes = scale_offset([rows, whole.shape[1]], whole.dtype) + 4 * rows
    signals = record.HEADER + (group.world_size + 1) * ceil_div(rows, config.block_m)
    return group.workspace(f"{OPERATOR}, fetched", ceil_div(nbytes, 2), signals)


def run_beside(
    group: Group, operands: Operands, splits: Sequence[int], gather: bool, whole: torch.Tensor, config: AllGatherGemmConfig,
    mark: int, product: Launch,
) -> None:  # fmt: skip
    """Run ``product`` while the peers' rows are fetched into ``whole``; with ``gather``, this rank's are copied there too."""
    from interlace.ops.all_gather_gemm import kernel

    x, ranks = operands.x, group.world_size
    workspace = workspace_for(group, splits, whole, config)
    context, signals = group.context(OPERATOR), workspace.signals.address
    offset, align = scale_offset([max(splits), whole.shape[1]], x.dtype), ALIGNMENT_BYTES // x.dtype.itemsize
    blocks = ceil_div(max(splits), config.block_m)
    notes = torch.empty(1 + blocks, dtype=torch.int32, device=group.device)
    kernel.stage_rows[(2 if group.backend == "cpu" else _STAGERS,)](
        x, operands.x_scale, workspace.data.address, offset, signals, workspace.epochs, context, notes, mark,
        per_source(workspace, ranks), len(x), operands.inner, row_stride(x),
        0 if operands.x_scale is None or operands.x_scale.numel() == 1 else 1, whole.shape[1] // align,
        WORLD_SIZE=ranks, INNER_ALIGN=align, ROWS=4, COLS=1024,
    )  # fmt: skip
    with copies.beside(group):
        kernel.admit_copies[(1,)](signals, context, notes, mark, blocks, WORLD_SIZE=ranks, BLOCK=128, num_warps=1)
        for step in range(0 if gather else 1, ranks):
            peer = (group.rank + step) % ranks
            _fetch(group, workspace, whole, notes, offset, splits, peer, operands.x_scale is not None, config)
        kernel.release_rows[(1,)](signals, context, notes, WORLD_SIZE=ranks, num_warps=1)
    product()
    copies.join(group)


def _fetch(
    group: Group, workspace: Workspace, whole: torch.Tensor, notes: torch.Tensor, offset: int, splits: Sequence[int], peer: int,
    scaled: bool, config: AllGatherGemmConfig,
) -> None:  # fmt: skip
    """Copy ``peer``'s rows piece by piece, and after each the stamps of its blocks."""
    rows, first, row_bytes = splits[peer], sum(splits[:peer]), whole.shape[1] * whole.dtype.itemsize
    there = workspace.data.address + peer * group.stride
    blocks = (
        workspace.signals.address + group.rank * group.stride + 4 * (record.HEADER + peer * per_source(workspace, group.world_size))
    )
    if scaled and rows:
        scales = whole.data_ptr() + scale_offset(whole.shape, whole.dtype)
        copies.copy(group, scales + 4 * first, there + offset, 4 * rows, peer)
    step = round_up(max(ceil_div(rows, config.pieces), 1), config.block_m)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        copies.copy(group, whole.data_ptr() + (first + start) * row_bytes, there + start * row_bytes, count * row_bytes, peer)
        block = start // config.block_m
        copies.copy(group, blocks + 4 * block, notes.data_ptr() + 4, 4 * ceil_div(count, config.block_m), group.rank)
