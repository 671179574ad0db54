"""``impl="pushed"``: one small kernel that stores rows in the peers' memory, before a product by
cuBLAS, or after it.

It is for few rows: nothing is hidden, and nothing is in the way either. Copy engines take
microseconds to begin, and a product in chunks reads its weight once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from interlace.comm import Group
from interlace.comm.constants import on_device
from interlace.comm.interpreter import require
from interlace.comm.kernels import MOST_MOVERS, Launch, cut_rows
from interlace.comm.replays import places
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.chunked import multiply_into
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.launch import row_stride
from interlace.registry import Implementation


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


def run_all_to_all(call: GemmCall) -> torch.Tensor:
    """Multiply, then let one kernel store all rows where they belong: ``[rows, N]``."""
    operands, group = call.operands, call.group
    product = operands.x.new_empty([operands.rows, operands.columns])
    if group.world_size == 1:
        multiply_into(product, operands.x, operands.w.T, operands.bias)
        return product
    require(group.backend)
    y = product.new_empty([call.rows.result, operands.columns])
    share = operands.rows // group.world_size
    rows = [share] * group.world_size
    # Before anything is enqueued: the workspace may have to grow.
    push = push_rows(group, call.operator.name, product, y, rows, call.mark, share=share)

    def enqueue() -> None:
        multiply_into(product, operands.x, operands.w.T, operands.bias)
        push()

    with group.running():
        key = (call.operator.name, "pushed", call.mark, places(y, product), operands.memory())
        group.replays.run(key, enqueue)
    return y


def run_reduce_scatter(call: GemmCall) -> torch.Tensor:
    """Multiply, then let one kernel store the peers' parts and sum this rank's: ``[M / R, N]``."""
    operands, group = call.operands, call.group
    ranks, rows, columns = group.world_size, call.rows.result, operands.columns
    parts = operands.x.new_empty([operands.rows, columns])
    if ranks == 1:
        multiply_into(parts, operands.x, operands.w.T, operands.bias)
        return parts
    require(group.backend)
    y = parts.new_empty([rows, columns])
    operator = call.operator.name
    nbytes = parts.numel() * parts.element_size()
    # Before anything is enqueued: the workspace may have to grow.
    workspace = group.workspace(f"{operator}, spread", nbytes, MOST_MOVERS * 2 * ranks)

    def enqueue() -> None:
        from interlace.gemm.kernels import staged

        multiply_into(parts, operands.x, operands.w.T, None)
        programs, tile = cut_rows(rows, columns, group)
        arguments = {
            "parts": parts,
            "bias": operands.bias,
            "y": y,
            "landing_address": workspace.data.address,
            "half_bytes": workspace.half_bytes,
            "signals": workspace.signals.address,
            "epochs": workspace.epochs,
            "ctx": group.context(operator),
            "call": call.mark,
            "rows": rows,
            "columns": columns,
        }
        Launch(staged.scatter_and_sum, (programs,), arguments, {"WORLD_SIZE": ranks, **tile})()

    with group.running():
        key = (operator, "pushed", call.mark, places(y, parts), operands.memory())
        group.replays.run(key, enqueue)
    return y


PUSHED_ALL_TO_ALL = Implementation(
    "pushed",
    "torch.mm, then one kernel that stores the rows in the peers' memory",
    run_all_to_all,
    needs(even_rows=True, same_dtype=True),
)
PUSHED_REDUCE_SCATTER = Implementation(
    "pushed",
    "torch.mm, then one kernel that stores the rows in the peers' memory and sums them",
    run_reduce_scatter,
    needs(even_rows=True, same_dtype=True),
)
