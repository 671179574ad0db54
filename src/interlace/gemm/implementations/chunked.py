"""``impl="chunked"``: cuBLAS multiplies each rank's rows in turn, and copy engines send them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from interlace.comm import Group
from interlace.comm.replay.deferred import DeferredCall
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.outputs import KeptOutput, kept_reservation, run_into_output
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.operands import Operands
from interlace.gemm.products import multiply_into
from interlace.registry import Implementation
from interlace.units import ceil_div


def run(call: GemmCall) -> DeferredCall | None:
    """Multiply rank by rank, and copy each rank's rows while the next ones are multiplied.

    Returns None if the caller has not asked for this implementation and the group cannot keep
    another output for these sizes.
    """
    adds_ranks = call.operator.adds_ranks
    return run_into_output(call, _output(call), lambda operands: (operands, adds_ranks))


def _output(call: GemmCall) -> KeptOutput:
    """Return the output of a call: ``[R, M/R, N]`` with rows rounded up."""
    operands, ranks = call.operands, call.group.world_size
    return KeptOutput(
        "chunked",
        call.operator.collective,
        functools.partial(multiply_in_chunks, call.group),
        (ranks, ceil_div(operands.rows, ranks), operands.columns),
        operands.out_dtype,
        {"transport": "copy_engine"},
    )


def multiply_in_chunks(
    group: Group,
    operands: Operands,
    adds_ranks: bool,
    *,
    out: torch.Tensor,
    send: Callable[[int], None],
) -> None:
    """Multiply each rank's rows by cuBLAS, the next rank's first; each chunk is on its way while
    the next one is computed.

    Args:
        adds_ranks: Whether the result is a sum over ranks; then the bias is added to this rank's
            own rows only.
        out: ``[R, M/R, N]``, the rows for rank r at r. Where R does not divide M, rows are rounded
            up, and the last ones of ``out`` are not written.
        send: Called with each chunk that is complete.
    """
    # The next rank's rows come first and this rank's own rows, which are not sent, last: their
    # product hides the last copy, and no two ranks send to the same rank at a time.
    rows, weight = out.shape[1], operands.weight()
    # The last ranks have no rows where there are fewer than ranks.
    firsts = [min(rank * rows, operands.rows) for rank in range(group.world_size + 1)]
    chunks = operands.split([last - first for first, last in itertools.pairwise(firsts)])
    for step in range(group.world_size):
        rank = (group.rank + 1 + step) % group.world_size
        # If parts are summed over ranks, each row's bias is added only once, by its owner.
        bias = None if adds_ranks and rank != group.rank else operands.bias
        count = len(chunks[rank].x)
        if count:
            multiply_into(out[rank][:count], chunks[rank], weight, bias)
        send(rank)


CHUNKED = Implementation(
    "chunked",
    "torch.mm for each rank's rows, and copy engines that take them",
    run,
    needs(even_rows=True, same_dtype=True),
    schedule="by_rank",
    reservation=lambda call: kept_reservation(call, _output(call)),
)
