"""One kernel that stores this rank's rows in its peers' memory, before a product with what all of
them have stored here.

For few rows: nothing is hidden, and nothing is in the way either. Copy engines take microseconds to
begin, and a product in parts reads its weight once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from interlace.comm import Group
from interlace.comm.constants import on_device
from interlace.comm.kernels import MOST_MOVERS, Launch, cut_rows
from interlace.gemm.launch import row_stride


def spread(
    group: Group,
    operator: str,
    x: torch.Tensor,
    whole: torch.Tensor,
    rows: Sequence[int],
    mark: int,
    *,
    share: int | None = None,
    distance: int = 0,
) -> Callable[[], None]:
    """What enqueues the kernel on the current stream, within ``Group.running``. Collective when the
    workspace must grow.

    Args:
        operator: that the deadline's error names, and whose memory it is.
        x: this rank's rows, contiguous along K.
        whole: ``[..., padded K]``, contiguous: where all ranks' rows are gathered; NaN where they
            do not come.
        rows: of each rank: how many it gives to each.
        share: of a gather None: every rank gets all of x, and rank r's rows lie one behind the
            other, those of the ranks before it first. Else x has ``rows`` for rank 0, then for rank
            1; each ``share`` of them lie together, ``distance`` rows from one to the next, and rank
            r's begin at row ``r * share``.
        mark: of ``Group.agree``.
    """
    ranks, columns = group.world_size, x.shape[1]
    nbytes = whole.numel() * whole.element_size()
    workspace = group.workspace(f"{operator}, spread", nbytes, MOST_MOVERS * 2 * ranks)

    def enqueue() -> None:
        from interlace.gemm.kernels import staged

        places = [rank * share if share else sum(rows[:rank]) for rank in range(ranks)]
        routes = on_device(
            group, [(place, count, 0) for place, count in zip(places, rows, strict=True)]
        )
        programs, tile = cut_rows(max(rows), columns, group)
        arguments = (
            x, whole, workspace.data.address, workspace.half_bytes, workspace.signals.address,
            workspace.epochs, group.context(operator), routes, mark, share or max(*rows, 1),
            distance, columns, row_stride(x), whole.shape[-1],
        )  # fmt: skip
        constants = {"WORLD_SIZE": ranks, "EACH": share is not None, **tile}
        Launch(staged.spread_rows, (programs,), arguments, constants)()

    return enqueue
