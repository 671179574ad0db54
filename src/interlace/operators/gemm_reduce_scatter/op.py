"""``torch.ops.interlace.gemm_reduce_scatter``: schema, shape inference, gradient. Triton is
imported by the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.registration import OPERATOR_TAGS, register
from interlace.gemm.splits import balanced, balanced_rows, place

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "gemm_reduce_scatter(Tensor x, Tensor w, Tensor? bias, Tensor? x_scale, Tensor? w_scale, "
    "SymInt[]? splits, "
    "ScalarType out_dtype, str group_name, str impl, str config) -> Tensor",
    tags=OPERATOR_TAGS,
)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    splits: Sequence[int] | None,
    out_dtype: torch.dtype,
    group_name: str,
    impl: str,
    config: str,
) -> torch.Tensor:
    from interlace.gemm.operands import Operands
    from interlace.operators.gemm_reduce_scatter.launch import run

    return run(Operands(x, w, bias, x_scale, w_scale, out_dtype), splits, group_name, impl, config)


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    splits: Sequence[int] | None,
    out_dtype: torch.dtype,
    group_name: str,
    *_: object,
) -> torch.Tensor:
    rank, world_size = place(group_name)
    rows = balanced_rows(x.shape[0], rank, world_size) if splits is None else splits[rank]
    return x.new_empty([rows, w.shape[0]], dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, bias, _, _, splits, _, ctx.group_name, impl, _ = inputs
    ctx.impl = (
        "auto" if impl in ("remote_stores", "triggered") else impl
    )  # an all-gather has no output that could carry itself
    ctx.splits = balanced(x.shape[0], place(ctx.group_name)[1]) if splits is None else splits
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Each rank's part of K needs the gradients of all rows: they are gathered while x's gradient
    is computed.
    """
    x, w = ctx.saved_tensors
    needs_bias = ctx.has_bias and ctx.needs_input_grad[2]
    gather = x is not None or needs_bias
    grad_x, rows = torch.ops.interlace.all_gather_gemm(
        grad.to(w.dtype),
        w.T,
        None,
        None,
        None,
        ctx.splits,
        w.dtype,
        gather,
        ctx.group_name,
        ctx.impl,
        "",
    )
    grad_w = rows.mT @ x if x is not None else None
    grad_bias = rows.sum(0, dtype=grad.dtype) if needs_bias else None
    return grad_x, grad_w, grad_bias, *[None] * 7


# What the pass for torch.compile makes of a sum of products, after autograd: it has no gradient.
_library.define(
    "gemm_sum_reduce_scatter(Tensor[] x, Tensor[] w, str group_name) -> Tensor", tags=OPERATOR_TAGS
)


def _run_sum(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    from interlace.gemm.operands import Operands
    from interlace.operators.gemm_reduce_scatter.launch import run_sum

    return run_sum(
        [Operands(*pair, None, None, None, pair[0].dtype) for pair in zip(x, w, strict=True)],
        group_name,
    )


def _fake_sum(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    rank, world_size = place(group_name)
    return x[0].new_empty([balanced_rows(x[0].shape[0], rank, world_size), w[0].shape[0]])


register(
    _library, "gemm_reduce_scatter", _run, _fake, backward=_backward, setup_context=_setup_context
)
register(_library, "gemm_sum_reduce_scatter", _run_sum, _fake_sum)
