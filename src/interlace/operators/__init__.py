"""The operators, a folder each. They do not import one another.

Importing any of them registers all of them: an operator's gradient may call another one as
``torch.ops.interlace.<name>``. Operators that other installed packages declare are registered, too.
"""

import importlib

from interlace.registry import load_entry_points

_MODULES = (
    "all_gather_gemm",
    "all_to_all_gemm",
    "embedding_all_to_all",
    "gemm_all_reduce",
    "gemm_all_to_all",
    "gemm_all_to_all_columns",
    "gemm_reduce_scatter",
    "gemm_reduce_scatter.sums",
    "linear_cross_entropy",
    "linear_top_k",
    "linears",
    "mixture_of_experts",
)

for _module in _MODULES:
    importlib.import_module(f"interlace.operators.{_module}")
load_entry_points()
