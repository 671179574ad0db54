"""``torch.ops.interlace.all_gather_gemm``: schema, shape inference, gradient. Triton is imported by the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.tags import OPERATOR_TAGS
from interlace.errors import ArgumentError
from interlace.products.splits import place

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "all_gather_gemm(Tensor x, Tensor w, Tensor? bias, Tensor? x_scale, Tensor? w_scale, SymInt[]? splits, "
    "ScalarType out_dtype, bool gather, str group_name, str impl, str config) -> (Tensor, Tensor)",
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
    gather: bool,
    group_name: str,
    impl: str,
    config: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    from interlace.ops.all_gather_gemm.launch import run
    from interlace.products.operands import Operands

    return run(Operands(x, w, bias, x_scale, w_scale, out_dtype), splits, gather, group_name, impl, config)


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    splits: Sequence[int] | None,
    out_dtype: torch.dtype,
    gather: bool,
    group_name: str,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0] * place(group_name)[1] if splits is None else sum(splits)
    return x.new_empty([rows, w.shape[0]], dtype=out_dtype), x.new_empty([rows if gather else 0, x.shape[1]])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, w, bias, _, _, ctx.splits, _, gather, ctx.group_name, impl, _ = inputs
    # What the gradient's operator cannot do for these rows, it was not asked for.
    uneven = ctx.splits is not None and len(set(ctx.splits)) > 1
    ctx.impl = "auto" if impl == "mapped" or (impl == "split" and uneven) else impl
    gathered = output[1]
    if ctx.needs_input_grad[1] and not gather:
        raise ArgumentError("all_gather_gemm: gather must be True where w requires a gradient; got False.")
    ctx.mark_non_differentiable(gathered)
    ctx.set_materialize_grads(False)
    ctx.dtype, ctx.has_bias = x.dtype, bias is not None
    ctx.save_for_backward(gathered if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)


def _backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    """Each rank's part of N gives a part of every row's gradient: they are summed while they are computed."""
    gathered, w = ctx.saved_tensors
    grad_x = grad_w = grad_bias = None
    if grad is not None:
        rows = grad.to(ctx.dtype)
        if w is not None:
            grad_x = torch.ops.interlace.gemm_reduce_scatter(
                rows, w.T, None, None, None, ctx.splits, ctx.dtype, ctx.group_name, ctx.impl, ""
            )
        grad_w = rows.mT @ gathered if gathered is not None else None
        grad_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return grad_x, grad_w, grad_bias, *[None] * 8


for _key in ("CPU", "CUDA"):
    _library.impl("all_gather_gemm", _run, _key)
torch.library.register_fake("interlace::all_gather_gemm", _fake, lib=_library)
torch.library.register_autograd("interlace::all_gather_gemm", _backward, setup_context=_setup_context, lib=_library)
