"""``impl="remote_stores"``: cuBLAS, whose stores go straight to the peers' memory."""

from __future__ import annotations

import torch

from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.chunked import multiply_into
from interlace.gemm.implementations.outputs import Output, run_into_output
from interlace.gemm.implementations.refusals import needs
from interlace.registry import Implementation
from interlace.units import ceil_div


def run(call: GemmCall) -> torch.Tensor | None:
    """Multiply into a mapped output; see docs/mapped-outputs.md.

    Returns None if the caller has not asked for this implementation and the group cannot keep
    another output for these sizes.
    """
    operands, ranks = call.operands, call.group.world_size
    output = Output(
        "remote_stores",
        call.operator.collective,
        multiply_for_ranks,
        (ranks, ceil_div(operands.rows, ranks), operands.columns),
        operands.out_dtype,
    )
    return run_into_output(call, output, operands.x, operands.w.T)


def multiply_for_ranks(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor) -> None:
    """Compute ``x @ w`` by cuBLAS into the parts for all ranks, in as few products as they allow.

    Args:
        x: ``[M, K]``.
        w: ``[K, N]``.
        out: ``[R, ceil(M / R), N]``, the rows for rank r at r; there may be memory between two
            parts. Where R does not divide M, the last rows of ``out`` are not written.
    """
    ranks, rows, _ = out.shape
    if len(x) != ranks * rows:
        for part, chunk in zip(out, x.split(rows), strict=False):
            multiply_into(part[: len(chunk)], chunk, w, None)
    elif out.stride(0) == rows * out.stride(1):
        torch.mm(x, w, out=out.flatten(0, 1))
    else:
        torch.bmm(x.unflatten(0, (ranks, rows)), w.expand(ranks, *w.shape), out=out)


REMOTE_STORES = Implementation(
    "remote_stores",
    "a product by cuBLAS, with the peers' memory as its output",
    run,
    needs(even_rows=True, same_dtype=True, no_bias=True),
    schedule="batch",
    former_names=("mapped",),
)
