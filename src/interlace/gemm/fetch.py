"""Copy engines that fetch the peers' rows while a product works on those that are here.

The protocol is explained in the README.md of ``all_gather_gemm``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from interlace.comm import Group, copies
from interlace.comm.group import Workspace
from interlace.comm.kernels import Launch
from interlace.gemm.kernels import layout
from interlace.gemm.launch import padded_columns, row_stride
from interlace.gemm.operands import ALIGNMENT_BYTES
from interlace.units import ceil_div, round_up

# Programs that stage rows: two a processor of an H200; with eight, calls take up to 60 us more
_STAGERS = 264
# Programs, one a processor of an H200, and what one of them takes at a time
_SETTLERS, _SETTLED = 132, 4096


@dataclasses.dataclass(frozen=True)
class Staging:
    """How each rank's rows lie for its peers: one behind the other, scales behind them.

    Attributes:
        operator: whose memory it is.
        rows: of the rank that has most.
        inner: K, elements of a row.
    """

    operator: str
    rows: int
    inner: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Elements from one row to the next."""
        return padded_columns(max(self.inner, 1), self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def scale_offset(self) -> int:
        """Bytes from the first row to the first scale."""
        return offset_behind(self.rows * self.row_bytes)

    def workspace(self, group: Group) -> Workspace:
        """Where the rows lie, in both halves: who fetches must know the address before the epoch.

        Collective when it must grow.
        """
        nbytes = self.scale_offset + 4 * self.rows
        return group.workspace(self.operator, ceil_div(nbytes, 2), layout.HEADER + group.world_size)


def offset_behind(nbytes: int) -> int:
    """Bytes from rows of ``nbytes`` to what lies behind them."""
    return round_up(nbytes, ALIGNMENT_BYTES)


class Piece(NamedTuple):
    """``times`` times ``nbytes`` from ``offset`` on of what a peer has staged, and where they are
    copied to.

    Attributes:
        target: the address here.
        distance: bytes from one to the next there.
    """

    offset: int
    target: int
    nbytes: int
    times: int = 1
    distance: int = 0


class Own(NamedTuple):
    """Rows of this rank that staging copies to where the peers' arrive.

    Attributes:
        first, rows: the first one in x, and how many.
        target: the address that they go to.
        share: how many lie together there.
        distance: rows from the first of these to the first of the next.
        staged: peers fetch them, too.
    """

    first: int
    rows: int
    target: int
    share: int
    distance: int
    staged: bool


@dataclasses.dataclass(frozen=True)
class Fetching:
    """Copies that have been enqueued beside the current stream.

    Attributes:
        arrived: by rank: behind the copies of its rows, for :func:`interlace.comm.copies.wait_for`.
        first: they were given priority.
    """

    arrived: dict[int, torch.cuda.Event | None]
    first: bool


def begin(
    group: Group,
    staging: Staging,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    whole: torch.Tensor,
    pieces: Mapping[int, Sequence[Piece]],
    mark: int,
    *,
    own: Own | None = None,
    first: bool,
    signal: bool,
) -> Fetching:
    """Enqueue, beside what the current stream gets next, what brings the peers' rows here. End with
    :func:`end`.

    The workspace's notes become this call's epoch, and its stamp once every peer's rows may be
    fetched, or no call's if one did not come.

    Args:
        x: this rank's rows, ``[m, K]``, contiguous along K.
        whole: where all rows are gathered, contiguous, its padding included; NaN everywhere if a
            peer's rows did not come.
        pieces: what is fetched, by peer, in this order.
        own: what of x itself is wanted beside it.
        first: stage this rank's rows before what the current stream gets next, rather than beside
            it. A product that takes all processors would otherwise let the peers wait until it
            ends.
        signal: set the product's signals behind each source's rows.
    """
    from interlace.gemm.kernels import staged

    workspace, ranks = staging.workspace(group), group.world_size
    context, signals, notes = (
        group.context(staging.operator),
        workspace.signals.address,
        workspace.notes,
    )
    align = ALIGNMENT_BYTES // x.dtype.itemsize
    place = own or Own(0, 0, 0, 1, 0, staged=True)
    arguments = {
        "x": x,
        "x_scale": x_scale,
        "staged_address": workspace.data.address,
        "scale_offset": staging.scale_offset,
        "own_address": place.target,
        "own_first": place.first,
        "own_rows": place.rows,
        "own_share": max(place.share, 1),
        "own_distance": place.distance,
        "signals": signals,
        "epochs": workspace.side_epochs,
        "ctx": context,
        "call": mark,
        "rows": len(x),
        "K": staging.inner,
        "x_stride": row_stride(x),
        "x_scale_stride": 0 if x_scale is None or x_scale.numel() == 1 else 1,
        "inner_groups": staging.width // align,
    }
    constants = {
        "WORLD_SIZE": ranks,
        "OWN": None if own is None else "too" if own.staged else "only",
        "INNER_ALIGN": align,
    }
    programs = 2 if group.backend == "cpu" else _STAGERS
    stage = Launch(staged.stage_rows, (programs,), arguments, constants | {"ROWS": 4, "COLS": 1024})
    fetching, since = Fetching({}, first), copies.so_far(group)
    if first:
        stage()
    with copies.beside(group, first=first, since=since):
        if not first:
            stage()
        # It needs a processor while the product has all of them: it takes one while rows are
        # staged, which leaves room.
        awaiting = {"signals": signals, "ctx": context, "notes": notes, "call": mark}
        Launch(staged.await_rows, (1,), awaiting, {"WORLD_SIZE": ranks, "num_warps": 1})()
        for source, parts in pieces.items():
            there = workspace.data.address + source * group.stride
            for part in parts:
                copies.fetch(
                    group, part.target, there + part.offset, part.nbytes, source, count=part.times,
                    distance=part.distance
                )  # fmt: skip
            if signal and parts:
                flag = signals + group.rank * group.stride + 4 * (layout.HEADER + source)
                copies.fetch(group, flag, notes.data_ptr() + 4, 4, group.rank)
            fetching.arrived[source] = copies.so_far(group)
        releasing = {
            "signals": signals,
            "ctx": context,
            "notes": notes,
            "whole": whole,
            "cells": whole.numel(),
        }
        Launch(staged.release_rows, (1,), releasing, {"WORLD_SIZE": ranks, "num_warps": 1})()
    return fetching


def settle(group: Group, staging: Staging, y: torch.Tensor, mark: int) -> None:
    """Behind products that know nothing of arrivals: let the contiguous ``y`` be NaN where a peer's
    rows have not come.
    """
    from interlace.gemm.kernels import staged

    workspace, blocks = staging.workspace(group), ceil_div(y.numel(), _SETTLED)
    settlers = 2 if group.backend == "cpu" else min(blocks, _SETTLERS)
    arguments = {
        "y": y,
        "epochs": workspace.epochs,
        "notes": workspace.notes,
        "call": mark,
        "blocks": blocks,
        "cells": y.numel(),
    }
    Launch(staged.settle_products, (settlers,), arguments, {"BLOCK": _SETTLED})()


def end(group: Group, fetching: Fetching) -> None:
    """Let the current stream go on once all copies are done and the peers know it."""
    copies.join(group, first=fetching.first)
