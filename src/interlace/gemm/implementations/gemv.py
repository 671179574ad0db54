"""``impl="gemv"``: the kernel of the operator around a matrix-vector product, for few rows."""

from __future__ import annotations

from typing import Any

from interlace.comm.groups.registration import entrance
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.operands import FLOATS
from interlace.registry import BATCH_INVARIANT, Implementation, operator_matching

MOST_ROWS = 16
"""With more rows the kernel needs a configuration that was tuned for them: with another one, 24 and
48 rows took 1.35 and 1.5 times the predicted time on two H200s.
"""


def run(call: GemmCall) -> Any:
    """Run the fused kernel of the operator on a GEMV that has the same collective."""
    operands = call.operands
    gemv = operator_matching("gemv", call.operator.collective)
    # Its kernel reads the weight along K.
    w = operands.w if operands.w.stride(1) == 1 else operands.w.contiguous()
    function = entrance(gemv.name)
    impl = BATCH_INVARIANT if call.is_batch_invariant else "fused"
    return function(operands.x, w, operands.bias, call.group_name, impl, "")


GEMV = Implementation(
    "gemv",
    "one kernel that sends sums as it reads the weight, for few rows",
    run,
    needs(most_rows=MOST_ROWS, same_dtype=True, dtypes=FLOATS),
    is_batch_invariant=True,
)
