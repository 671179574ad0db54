"""``impl="remote_stores"`` of an all-reduce: cuBLAS, whose stores go straight to the peers'
memory.
"""

from __future__ import annotations

import torch

from interlace.comm.replay.deferred import DeferredCall
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.outputs import KeptOutput, kept_reservation, run_into_output
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.operands import Operands
from interlace.gemm.products import multiply_into
from interlace.registry import Implementation
from interlace.units import ceil_div, next_power_of_2

_FEW_ROWS = 128
"""Rows of a rank up to which a batch of products, one for each rank, takes longer than one product
of all rows, by up to 45 % on an H200: tiles of the library's kernels are as high."""


_HOST_US = 400.0
"""What an eager call takes the host whose operands lie elsewhere each time: 300 to 500 on two H200s
(decision 0014).
"""


def run(call: GemmCall) -> DeferredCall | None:
    """Multiply into a mapped output; see docs/mapped-outputs.md.

    Returns None if the caller has not asked for this implementation and the group cannot keep
    another output for these sizes.
    """
    return run_into_output(call, _output(call))


def _output(call: GemmCall) -> KeptOutput:
    """Return the output of a call: ``[M, N]``, for one product, where M may be rounded up, or ``[R,
    M / R, N]``, for one product per rank.
    """
    operands, ranks = call.operands, call.group.world_size
    columns, dtype = operands.columns, operands.out_dtype
    rows = ceil_div(operands.rows, ranks)
    shape: tuple[int, ...] = ranks, rows, columns
    if rows <= _FEW_ROWS:
        # Some ranks may sum fewer rows than others. Powers of 2 need little padding.
        shape = ranks * next_power_of_2(rows), columns
    elif rows * columns * dtype.itemsize % call.group.granularity == 0:
        shape = ranks * rows, columns
    return KeptOutput("remote_stores", call.operator.collective, multiply_for_ranks, shape, dtype)


def multiply_for_ranks(operands: Operands, *, out: torch.Tensor) -> None:
    """Compute a product by cuBLAS into the parts for all ranks.

    Args:
        operands: ``[M, K]`` and ``[N, K]``, without a bias.
        out: ``[M, N]`` or ``[R, ceil(M / R), N]``, the rows for rank r behind those for the ranks
            before it. It may have more rows than x; the last ones are not written then.
    """
    x, weight = operands.x, operands.weight()
    if out.dim() == 2:
        multiply_into(out[: len(x)], operands.all_rows(), weight)
        return
    ranks, rows, _ = out.shape
    if len(x) == ranks * rows and operands.x_scale is None:
        w = weight.transposed
        torch.bmm(x.unflatten(0, (ranks, rows)), w.expand(ranks, *w.shape), out=out)
        return
    # The last rank's rows are fewer, or none, so there is no batch of equal products, nor is there
    # one of float8.
    counts = [min(rows, len(x) - first) for first in range(0, len(x), rows)]
    for part, chunk in zip(out, operands.split(counts), strict=False):
        multiply_into(part[: len(chunk.x)], chunk, weight)


REMOTE_STORES = Implementation(
    "remote_stores",
    "a product by cuBLAS, with the peers' memory as its output",
    run,
    # It does not matter which rank sums which rows, so they need not divide evenly.
    needs(same_dtype=True, no_bias=True),
    host_us=_HOST_US,
    reservation=lambda call: kept_reservation(call, _output(call)),
)
