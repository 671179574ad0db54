"""``impl="remote_stores"``: cuBLAS, whose stores go straight to the peers' memory."""

from __future__ import annotations

import torch

from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.outputs import Output, run_into_output
from interlace.gemm.implementations.refusals import needs
from interlace.registry import Implementation


def run(call: GemmCall) -> torch.Tensor | None:
    """Multiply by ``torch.mm`` into a mapped output; see docs/mapped-outputs.md.

    None if the caller has not asked for it and there is no output for these sizes.
    """
    operands = call.operands
    output = Output(
        "remote_stores",
        call.operator.collective,
        torch.mm,
        (operands.rows, operands.columns),
        operands.out_dtype,
    )
    return run_into_output(call, output, operands.x, operands.w.T)


REMOTE_STORES = Implementation(
    "remote_stores",
    "torch.mm, with the peers' memory as its output",
    run,
    needs(even_rows=True, same_dtype=True, no_bias=True),
    former_names=("mapped",),
)
