"""``gemm_sum_reduce_scatter``: a sum of products before a reduce-scatter.

The pass for ``torch.compile`` makes it, after autograd, so it has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm import Group, process_group_named
from interlace.comm.groups.registration import OPERATOR_TAGS, register
from interlace.gemm import dispatch, invariance
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import Operands
from interlace.gemm.reference import sum_rows
from interlace.gemm.splits import balanced, balanced_rows, rank_in
from interlace.operators.gemm_reduce_scatter import GemmReduceScatter, chunked

NAME = GemmReduceScatter.name
_NAME = GemmReduceScatter.sum_name

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(f"{_NAME}(Tensor[] x, Tensor[] w, str group_name) -> Tensor", tags=OPERATOR_TAGS)


def _run(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    """Run one call of matrices of the same rows, columns and dtypes.

    Raises:
        RankMismatchError: Ranks differ in shapes or dtypes.
    """
    pairs = zip(x, w, strict=True)
    products = [Operands(*pair, None, None, None, pair[0].dtype) for pair in pairs]
    if invariance.is_enabled():
        invariance.refuse(f"{NAME} of a sum of products")
    first = products[0]
    group = dispatch.group_for(NAME, group_name, first.x.device)
    key = (f"{NAME}, sum", *(product.signature() for product in products))
    mark, rows, config = group.once(key, lambda: _decide_sum(products, group))
    if not first.rows or not first.columns:
        return first.x.new_empty([rows[group.rank], first.columns])
    if group.spans_nodes:
        group.check()
        total = first.x.new_empty([first.rows, first.columns])
        chunked.multiply_sum_into(
            total,
            [product.all_rows() for product in products],
            [product.weight() for product in products],
        )
        return sum_rows(total, rows, process_group_named(group_name))
    y: torch.Tensor = group.perform(chunked.run_products(products, rows, group, config, mark))
    return y


def _decide_sum(
    products: Sequence[Operands], group: Group
) -> tuple[int, tuple[int, ...], GemmConfig]:
    """Agree on a sum of products: its mark, each rank's rows, and the kernel's configuration."""
    first, ranks = products[0], group.world_size
    shared = {"products": tuple(tuple(product.agreed().items()) for product in products)}
    mark, _ = group.agreement.agree_on_sizes(
        f"{NAME}, sum", shared, {"rows": first.rows}, first.rows
    )
    inner = sum(product.inner for product in products)
    sizes = first.sizes(first.rows) | {"inner": inner}
    choice = GemmReduceScatter().choose(**sizes, world_size=ranks)
    return mark, tuple(balanced(first.rows, ranks)), choice.config


def _fake(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    rank, world_size = rank_in(group_name)
    return x[0].new_empty([balanced_rows(x[0].shape[0], rank, world_size), w[0].shape[0]])


register(_library, _NAME, _run, _fake)
