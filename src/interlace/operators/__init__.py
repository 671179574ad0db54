"""The operators, a folder each. They do not import one another.

Importing any of them registers all of them: an operator's gradient may call another one as
``torch.ops.interlace.<name>``.
"""

from interlace.operators.all_gather_gemm import op as _all_gather_gemm
from interlace.operators.all_to_all_bmm import op as _all_to_all_bmm
from interlace.operators.embedding_all_to_all import op as _embedding_all_to_all
from interlace.operators.gemm_all_reduce import op as _gemm_all_reduce
from interlace.operators.gemm_all_to_all import op as _gemm_all_to_all
from interlace.operators.gemm_reduce_scatter import op as _gemm_reduce_scatter
from interlace.operators.gemv_all_reduce import op as _gemv_all_reduce
from interlace.operators.mixture_of_experts import op as _mixture_of_experts

REGISTERED = (
    _all_gather_gemm,
    _all_to_all_bmm,
    _embedding_all_to_all,
    _gemm_all_reduce,
    _gemm_all_to_all,
    _gemm_reduce_scatter,
    _gemv_all_reduce,
    _mixture_of_experts,
)
"""The modules that define ``torch.ops.interlace.*``."""
