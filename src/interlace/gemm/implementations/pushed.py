"""``impl="pushed"``: one small kernel stores this rank's rows in its peers' memory, then cuBLAS.

It is for few rows: nothing is hidden, and nothing is in the way either. Copy engines take
microseconds to begin, and a product in chunks reads its weight once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from interlace.comm import Group
from interlace.comm.constants import on_device
from interlace.comm.kernels import MOST_MOVERS, Launch, cut_rows
from interlace.gemm.launch import row_stride


def push_rows(
    group: Group,
    operator: str,
    x: torch.Tensor,
    gathered: torch.Tensor,
    rows: Sequence[int],
    mark: int,
    *,
    share: int | None = None,
    distance: int = 0,
) -> Callable[[], None]:
    """Return a function that enqueues the kernel on the current stream, within ``Group.running``.

    Collective when the workspace must grow.

    Args:
        operator: The operator that the deadline's error names, and whose memory it is.
        x: This rank's rows, contiguous along K.
        gathered: ``[..., padded K]``, contiguous: where all ranks' rows arrive; NaN where they do
            not come.
        rows: The number of rows that each rank gives to each.
        mark: The number from ``Group.agree``.
        share: None for a gather: every rank gets all of x, and rank r's rows lie behind those of
            the ranks before it. Else x has ``rows`` for rank 0, then for rank 1; each ``share`` of
            them lie together, and rank r's begin at row ``r * share``.
        distance: Rows from one share to the next.
    """
    ranks, columns = group.world_size, x.shape[1]
    nbytes = gathered.numel() * gathered.element_size()
    workspace = group.workspace(f"{operator}, spread", nbytes, MOST_MOVERS * 2 * ranks)

    def enqueue() -> None:
        from interlace.gemm.kernels import staged

        # A route is the row at which a source's rows begin in ``gathered``, and their number.
        offsets = [rank * share if share else sum(rows[:rank]) for rank in range(ranks)]
        routes = [(offset, count, 0) for offset, count in zip(offsets, rows, strict=True)]
        programs, tile = cut_rows(max(rows), columns, group)
        arguments = {
            "x": x,
            "gathered": gathered,
            "landing_address": workspace.data.address,
            "half_bytes": workspace.half_bytes,
            "signals": workspace.signals.address,
            "epochs": workspace.epochs,
            "ctx": group.context(operator),
            "routes": on_device(group, routes),
            "call": mark,
            "share": share or max(*rows, 1),
            "distance": distance,
            "K": columns,
            "x_stride": row_stride(x),
            "gathered_stride": gathered.shape[-1],
        }
        # With a share every rank gets other rows of x; without, every rank gets all rows.
        constants = {"WORLD_SIZE": ranks, "SCATTER": share is not None, **tile}
        Launch(staged.spread_rows, (programs,), arguments, constants)()

    return enqueue
