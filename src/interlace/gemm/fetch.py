"""Copy engines fetch the peers' rows while a product works on the rows that are present.

The protocol is explained in the README.md of ``all_gather_gemm``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from interlace.comm import Group
from interlace.comm.groups import copies
from interlace.comm.groups.group import Workspace
from interlace.comm.groups.reservation import WorkspaceSize
from interlace.comm.launching.kernels import Launch, known_factor, processors
from interlace.gemm.kernels import layout
from interlace.gemm.launch import padded_columns, row_stride, scale_stride
from interlace.gemm.operands import ALIGNMENT_BYTES
from interlace.units import ceil_div, round_up

_SMALL = {"num_warps": 1, "maxnreg": 32}
"""Of kernels that may have to begin beside a product. The library's leave an SM 1024 registers
where their programs have 384 threads of 168.
"""

_STAGERS_PER_SM = 2  # programs that stage rows; with eight, calls take up to 60 us more


@dataclasses.dataclass(frozen=True)
class Staging:
    """The layout of a rank's rows in memory that peers read: rows one after the other, then scales.

    Attributes:
        operator: The operator that owns the memory.
        rows: The largest number of rows of any rank.
        inner: K, the elements of a row.
        dtype: The dtype of the rows.
        scales: The float32 scales that each row has.
    """

    operator: str
    rows: int
    inner: int
    dtype: torch.dtype
    scales: int = 0

    @property
    def width(self) -> int:
        """The number of elements from one row to the next, padding included."""
        return padded_columns(max(self.inner, 1), self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def scale_offset(self) -> int:
        """The number of bytes from the first row to the first scale."""
        return offset_behind(self.rows * self.row_bytes)

    def size(self, ranks: int) -> WorkspaceSize:
        """Return the size of the workspace that holds the staged rows."""
        # A copy's address must be known on the host before the call's epoch, so the rows span both
        # halves of the workspace instead of alternating between them by epoch.
        nbytes = self.scale_offset + 4 * self.rows * self.scales
        return WorkspaceSize(self.operator, ceil_div(nbytes, 2), layout.HEADER + ranks)

    def workspace(self, group: Group) -> Workspace:
        """Return the operator's workspace, grown to hold the staged rows.

        Collective when it must grow.
        """
        return group.workspace(*self.size(group.world_size))


def offset_behind(nbytes: int) -> int:
    """Return the number of bytes from the begin of rows of ``nbytes`` to the aligned data after
    them.
    """
    return round_up(nbytes, ALIGNMENT_BYTES)


class Piece(NamedTuple):
    """A copy from a peer's rows to this rank.

    Attributes:
        offset: Bytes from the begin of the peer's staged memory, or of its x.
        target: The address on this rank.
        nbytes: The bytes to copy.
    """

    offset: int
    target: int
    nbytes: int


Arrivals = dict[int, torch.cuda.Event | None]
"""For each rank, an event after the copies of its rows, to be passed to
:func:`interlace.comm.groups.copies.wait_for`.
"""


def begin(
    group: Group,
    staging: Staging,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    gathered: torch.Tensor,
    pieces: Mapping[int, Sequence[Piece]],
    mark: int,
    *,
    own_address: int | None = None,
    in_place: bool = False,
    signal: bool,
) -> Arrivals:
    """Enqueue the copies that fetch the peers' rows, to run beside the current stream's next work.
    :func:`end` must follow.

    Kernels record two stamps in the workspace's notes: this call's epoch, and the call's stamp if
    every peer's rows may be fetched, or 0 if a peer did not stage them in time.

    Args:
        group: The ranks.
        staging: The layout of staged rows.
        x: This rank's rows, ``[m, K]``, contiguous along K.
        x_scale: The scale of float8 rows, or contiguous scales, as many as each has; else None.
        gathered: The memory for all rows, contiguous, padding included.
        pieces: The copies from each peer, in the order in which they are enqueued.
        mark: The number from the ranks' agreement.
        own_address: The address in ``gathered`` that x is copied to as well; None for no copy.
        in_place: Whether peers fetch the rows from x itself, which lies at one place of symmetric
            memory on every rank. :func:`settle`, or the product, must wait for them then.
        signal: Whether to set the product's signals after each source's rows.
    """
    from interlace.gemm.kernels import staged

    workspace, ranks = staging.workspace(group), group.world_size
    context, signals, notes = (
        group.context(staging.operator),
        workspace.signals.address,
        workspace.notes,
    )
    align = ALIGNMENT_BYTES // x.dtype.itemsize
    arguments = {
        "x": x,
        "x_scale": x_scale,
        "staged_address": workspace.data.address,
        "scale_offset": staging.scale_offset,
        "own_address": own_address or 0,
        "signals": signals,
        "epochs": workspace.side_epochs,
        "ctx": context,
        "call": mark,
        "rows": len(x),
        "K": staging.inner,
        "x_stride": row_stride(x),
        "x_scale_stride": scale_stride(x_scale),
        "inner_groups": staging.width // align,
    }
    constants = {
        "WORLD_SIZE": ranks,
        "IN_PLACE": in_place,
        "OWN": own_address is not None,
        "INNER_ALIGN": align,
        "FACTOR": known_factor(x.shape[1], row_stride(x)),
        "SCALES": staging.scales,
    }
    # 1. Stage this rank's rows in symmetric memory, unless they are there, and tell the peers.
    programs = 2 if group.backend == "cpu" else _STAGERS_PER_SM * processors(group.device)
    constants |= {"ROWS": 4, "COLS": 1024}
    if in_place and own_address is None:
        programs, constants = 1, constants | _SMALL
    # Peers' copies of the first row: x has the same place on every rank.
    first_row = x.data_ptr() - group.rank * group.stride if in_place else workspace.data.address
    arrived: Arrivals = {}
    since = copies.so_far(group)
    # Staging comes before the current stream's next work, not beside it: a product that got the
    # SMs first would occupy all of them, and keep the peers waiting until it ends.
    Launch(staged.stage_rows, (programs,), arguments, constants)()
    with copies.beside(group, first=True, since=since):
        # 2. Wait until every peer has staged its rows. This kernel needs an SM while the product
        # occupies all of them; it gets one now, while staging still leaves SMs free.
        awaiting = {"signals": signals, "ctx": context, "notes": notes, "call": mark}
        Launch(staged.await_rows, (1,), awaiting, {"WORLD_SIZE": ranks, **_SMALL})()
        # 3. Copy the peers' rows. A copy of the call's stamp into the signal follows the rows of
        # each source on the same stream, so the product sees the signal only after the rows.
        for source, parts in pieces.items():
            rows_address = first_row + source * group.stride
            for part in parts:
                copies.fetch(group, part.target, rows_address + part.offset, part.nbytes, source)
            if signal and parts:
                flag = signals + group.rank * group.stride + 4 * (layout.HEADER + source)
                copies.fetch(group, flag, notes.data_ptr() + 4, 4, group.rank)
            arrived[source] = copies.so_far(group)
        # 4. Tell every peer that its rows were fetched, so that it may write others there. The
        # number of the call is copied, which takes no SM; also where a peer was late, as the copies
        # are over.
        done = signals + 4 * (layout.DONE + group.rank)
        for step in range(1, ranks):
            source = (group.rank + step) % ranks
            target = done + source * group.stride
            copies.signal(group, copies.Transfer(target, notes.data_ptr(), 4, source))
    return arrived


def settle(
    group: Group,
    staging: Staging,
    gathered: torch.Tensor | None,
    y: torch.Tensor | None,
    mark: int,
    *,
    in_place: bool,
) -> None:
    """Fill contiguous memory with NaN if a peer's rows did not arrive; and with ``in_place`` wait
    until peers have fetched this rank's rows.

    Products by cuBLAS cannot check arrivals, so this runs between the copies and them, for the rows
    that they multiply, or after them, for the rows that a call returns and the product.
    """
    from interlace.gemm.kernels import staged

    workspace = staging.workspace(group)
    arguments = {
        "gathered": gathered,
        "y": y,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(staging.operator),
        "notes": workspace.notes,
        "call": mark,
        "cells": 0 if gathered is None else gathered.numel(),
        "results": 0 if y is None else y.numel(),
    }
    # Behind products, where y is filled, there is room.
    options = _SMALL if y is None else {"num_warps": 1}
    constants = {"WORLD_SIZE": group.world_size, "IN_PLACE": in_place, **options}
    Launch(staged.settle_rows, (1,), arguments, constants)()


def behind(group: Group) -> contextlib.AbstractContextManager[Any]:
    """Return a context whose work follows the copies on their stream."""
    if group.backend == "cpu":
        return contextlib.nullcontext()
    return group.streams.on(group.streams.side(True))


def end(group: Group) -> None:
    """Make the current stream wait until all copies are done and the peers have been told."""
    copies.join(group, first=True)
