"""``torch.ops.interlace.gemm_all_to_all``: schema, shape inference, gradient. Triton is imported by
the first call.

The gradient travels by an operator of its own, ``gemm_all_to_all_gradient``, so that compilers see
it. ``bmm_all_to_all`` is the same for a batch of products, ``bmm_sum_all_to_all`` for a sum of
batches; the pass for ``torch.compile`` makes them, after autograd, so they have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.registration import OPERATOR_TAGS, register

_library = torch.library.Library("interlace", "FRAGMENT")
_SPLITS = "SymInt[]? input_splits, SymInt[]? output_splits"
_library.define(
    "gemm_all_to_all(Tensor x, Tensor w, Tensor? bias, Tensor? x_scale, Tensor? w_scale, "
    f"{_SPLITS}, ScalarType out_dtype, "
    "str group_name, str impl, str config) -> Tensor",
    tags=OPERATOR_TAGS,
)
_library.define(
    "bmm_all_to_all(Tensor x, Tensor w, str group_name, str impl) -> Tensor", tags=OPERATOR_TAGS
)
_library.define(
    "bmm_sum_all_to_all(Tensor[] x, Tensor[] w, str group_name) -> Tensor", tags=OPERATOR_TAGS
)
_library.define(
    f"gemm_all_to_all_gradient(Tensor grad, {_SPLITS}, str group_name) -> Tensor",
    tags=OPERATOR_TAGS,
)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    out_dtype: torch.dtype,
    group_name: str,
    impl: str,
    config: str,
) -> torch.Tensor:
    from interlace.gemm.operands import Operands
    from interlace.operators.gemm_all_to_all.launch import run

    return run(
        Operands(x, w, bias, x_scale, w_scale, out_dtype),
        input_splits,
        output_splits,
        group_name,
        impl,
        config,
    )


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    out_dtype: torch.dtype,
    *_: object,
) -> torch.Tensor:
    rows = x.shape[0] if output_splits is None else sum(output_splits)
    return x.new_empty([rows, w.shape[0]], dtype=out_dtype)


def _run_batch(x: torch.Tensor, w: torch.Tensor, group_name: str, impl: str) -> torch.Tensor:
    from interlace.operators.gemm_all_to_all.launch import run_batch

    return run_batch(x, w, group_name, impl)


def _fake_batch(x: torch.Tensor, w: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty([x.shape[0] * x.shape[1], w.shape[2]])


def _run_sum(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    from interlace.operators.gemm_all_to_all.launch import run_sum

    return run_sum(x, w, group_name)


def _fake_sum(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    return _fake_batch(x[0], w[0])


def _run_gradient(
    grad: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group_name: str,
) -> torch.Tensor:
    from interlace.operators.gemm_all_to_all.launch import run_gradient

    return run_gradient(grad, input_splits, output_splits, group_name)


def _fake_gradient(
    grad: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group_name: str,
) -> torch.Tensor:
    rows = grad.shape[0] if input_splits is None else sum(input_splits)
    return grad.new_empty([rows, grad.shape[1]])


def _setup_gradient_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.input_splits, ctx.output_splits, ctx.group_name = inputs


def _backward_of_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Rows that came back from their owners go to them once more."""
    rows = torch.ops.interlace.gemm_all_to_all_gradient(
        grad, ctx.output_splits, ctx.input_splits, ctx.group_name
    )
    return rows, None, None, None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, bias, _, _, *splits, _, ctx.group_name, _, _ = inputs
    ctx.splits, ctx.has_bias = tuple(splits), bias is not None
    ctx.dtype = x.dtype
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None
    )


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The gradient goes back the way its row came, and the product's own gradient is local."""
    x, w = ctx.saved_tensors
    rows = torch.ops.interlace.gemm_all_to_all_gradient(grad, *ctx.splits, ctx.group_name)
    grad_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    rows = rows.to(ctx.dtype)
    grad_x = rows @ w if w is not None else None
    grad_w = rows.mT @ x if x is not None else None
    return grad_x, grad_w, grad_bias, *[None] * 8


register(_library, "gemm_all_to_all", _run, _fake, backward=_backward, setup_context=_setup_context)
register(
    _library, "gemm_all_to_all_gradient", _run_gradient, _fake_gradient,
    backward=_backward_of_gradient, setup_context=_setup_gradient_context,
)  # fmt: skip
register(_library, "bmm_all_to_all", _run_batch, _fake_batch)
register(_library, "bmm_sum_all_to_all", _run_sum, _fake_sum)
