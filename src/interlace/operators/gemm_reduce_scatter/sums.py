"""``gemm_sum_reduce_scatter``: a sum of products before a reduce-scatter.

The pass for ``torch.compile`` makes it, after autograd, so it has no gradient.
"""

from __future__ import annotations

import torch

from interlace.comm.groups.registration import OPERATOR_TAGS, register
from interlace.gemm.operands import Operands
from interlace.gemm.splits import balanced_rows, rank_in
from interlace.operators.gemm_reduce_scatter import GemmReduceScatter, chunked

_NAME = GemmReduceScatter.sum_name

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(f"{_NAME}(Tensor[] x, Tensor[] w, str group_name) -> Tensor", tags=OPERATOR_TAGS)


def _run(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    pairs = zip(x, w, strict=True)
    products = [Operands(*pair, None, None, None, pair[0].dtype) for pair in pairs]
    return chunked.run_sum(products, group_name)


def _fake(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    rank, world_size = rank_in(group_name)
    return x[0].new_empty([balanced_rows(x[0].shape[0], rank, world_size), w[0].shape[0]])


register(_library, _NAME, _run, _fake)
