"""Copy engines that fetch the peers' rows while the product works on those that are here; README.md explains the protocol."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from interlace.comm import Group, copies
from interlace.comm.group import Workspace
from interlace.comm.kernels import Launch
from interlace.ops.all_gather_gemm.config import OPERATOR
from interlace.products import record
from interlace.products.launch import row_stride
from interlace.products.operands import ALIGNMENT_BYTES, Operands
from interlace.units import ceil_div, round_up

_STAGERS = 264  # programs that stage rows: two a processor of an H200, more would only be launched


def scale_offset(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from rows ``[*shape]`` to their scales."""
    return round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT_BYTES)


def workspace_for(group: Group, splits: Sequence[int], whole: torch.Tensor) -> Workspace:
    """Where a rank's rows lie for its peers, in both halves: who fetches must know the address before the epoch.

    Collective when it must grow.
    """
    rows = max(splits)
    nbytes = scale_offset([rows, whole.shape[1]], whole.dtype) + 4 * rows
    return group.workspace(OPERATOR, ceil_div(nbytes, 2), record.HEADER + group.world_size)


@dataclasses.dataclass(frozen=True)
class Fetching:
    """Copies that have been enqueued beside the current stream.

    Attributes:
        arrived: by rank: behind the copy of its rows, for :func:`interlace.comm.copies.wait_for`.
        first: they were given priority.
    """

    arrived: list[torch.cuda.Event | None]
    first: bool


def begin(
    group: Group,
    workspace: Workspace,
    operands: Operands,
    splits: Sequence[int],
    whole: torch.Tensor,
    mark: int,
    *,
    gather: bool,
    first: bool,
    signal: bool,
) -> Fetching:
    """Enqueue, beside what the current stream gets next, what brings the peers' rows into ``whole``. End with :func:`end`.

    Args:
        workspace: its notes become this call's epoch, and its stamp once every peer's rows may be fetched, or no call's if one did
            not come.
        gather: copy this rank's own rows there, too.
        first: let staging this rank's rows have processors before the current stream's launches.
        signal: set the product's signals behind each rank's rows.
    """
    from interlace.ops.all_gather_gemm import kernel

    x, ranks = operands.x, group.world_size
    context, signals, notes = group.context(OPERATOR), workspace.signals.address, workspace.notes
    offset, align = scale_offset([max(splits), whole.shape[1]], x.dtype), ALIGNMENT_BYTES // x.dtype.itemsize
    fetching = Fetching([None] * ranks, first)
    with copies.beside(group, first=first):
        arguments = (
            x, operands.x_scale, workspace.data.address, offset, signals, workspace.side_epochs, context, notes, mark,
            len(x), operands.inner, row_stride(x), 0 if operands.x_scale is None or operands.x_scale.numel() == 1 else 1,
            whole.shape[1] // align,
        )  # fmt: skip
        constants = {"WORLD_SIZE": ranks, "INNER_ALIGN": align, "ROWS": 4, "COLS": 1024}
        Launch(kernel.stage_rows, (2 if group.backend == "cpu" else _STAGERS,), arguments, constants)()
        for step in range(1, ranks + gather):  # this rank's own rows last: no product waits for them
            source = (group.rank + step) % ranks
            _fetch(group, workspace, whole, offset, splits, source, signal)
            fetching.arrived[source] = copies.so_far(group)
        Launch(kernel.release_rows, (1,), (signals, context, notes), {"WORLD_SIZE": ranks, "num_warps": 1})()
    return fetching


def end(group: Group, fetching: Fetching) -> None:
    """Let the current stream go on once all copies are done and the peers know it."""
    copies.join(group, first=fetching.first)


def _fetch(
    group: Group, workspace: Workspace, whole: torch.Tensor, offset: int, splits: Sequence[int], peer: int, signal: bool
) -> None:  # fmt: skip
    """Copy ``peer``'s rows, then the stamp that says so."""
    rows, first, row_bytes = splits[peer], sum(splits[:peer]), whole.shape[1] * whole.dtype.itemsize
    if rows == 0:
        return
    there = workspace.data.address + peer * group.stride
    if whole.dtype.itemsize == 1:  # float8 has scales
        scales = whole.data_ptr() + scale_offset(whole.shape, whole.dtype)
        copies.fetch(group, scales + 4 * first, there + offset, 4 * rows, peer)
    copies.fetch(group, whole.data_ptr() + first * row_bytes, there, rows * row_bytes, peer)
    if signal and peer != group.rank:
        flag = workspace.signals.address + group.rank * group.stride + 4 * (record.HEADER + peer)
        copies.fetch(group, flag, workspace.notes.data_ptr() + 4, 4, group.rank)
