"""FLOPs, memory bytes, link bytes and messages of every operator, in plain Python.

Three readers: benchmarks (physical floors), the simulator (durations), and the tests, which hold
them against the traffic that the CPU backend counts. :data:`OPERATOR_COSTS` maps an operator's name
to its formula.
"""

# Importing a file declares the costs in it, so the register is complete once this package is
# imported; the files are plain Python and cost no time.
from interlace.costs import (  # noqa: F401
    embedding_all_to_all,
    gemm,
    gemv_all_reduce,
    linear_cross_entropy,
    linear_top_k,
    mixture_of_experts,
    sequence,
)
from interlace.costs.registry import (
    OPERATOR_COSTS,
    OperatorCost,
    cost_of,
    find_cost,
    network_cost_of,
)

__all__ = [
    "OPERATOR_COSTS",
    "OperatorCost",
    "cost_of",
    "find_cost",
    "network_cost_of",
]
