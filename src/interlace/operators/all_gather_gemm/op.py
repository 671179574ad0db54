"""``torch.ops.interlace.all_gather_gemm``: schema, shape inference, gradient. Triton is imported by
the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.registration import OPERATOR_TAGS, register
from interlace.errors import ArgumentError
from interlace.gemm.splits import place

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "all_gather_gemm(Tensor x, Tensor w, Tensor? bias, Tensor? x_scale, Tensor? w_scale, "
    "SymInt[]? splits, "
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
    from interlace.gemm.operands import Operands
    from interlace.operators.all_gather_gemm.launch import run

    return run(
        Operands(x, w, bias, x_scale, w_scale, out_dtype), splits, gather, group_name, impl, config
    )


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
    return x.new_empty([rows, w.shape[0]], dtype=out_dtype), x.new_empty(
        [rows if gather else 0, x.shape[1]]
    )


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, w, bias, _, _, ctx.splits, _, gather, ctx.group_name, impl, _ = inputs
    # What the gradient's operator cannot do for these rows, it was not asked for.
    uneven = ctx.splits is not None and len(set(ctx.splits)) > 1
    ctx.impl = "auto" if impl == "pushed" or (impl == "chunked" and uneven) else impl
    gathered = output[1]
    if ctx.needs_input_grad[1] and not gather:
        raise ArgumentError(
            "all_gather_gemm: gather must be True where w requires a gradient; got False."
        )
    if not gather:
        ctx.mark_non_differentiable(gathered)  # it has no rows
    ctx.set_materialize_grads(False)
    ctx.dtype, ctx.has_bias = x.dtype, bias is not None
    ctx.save_for_backward(
        gathered if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None
    )


def _backward(
    ctx: Any, grad: torch.Tensor | None, grad_gathered: torch.Tensor | None
) -> tuple[Any, ...]:
    """Each rank's part of N gives a part of every row's gradient: they are summed while they are
    computed.

    The gathered x has a gradient in second derivatives only, where grad_w, which is a product with
    it, is differentiated.
    """
    gathered, w = ctx.saved_tensors
    grad_x = grad_w = grad_bias = None
    summands = []  # pairs whose products, summed over pairs and ranks, are the gradient of x
    if grad is not None:
        rows = grad.to(ctx.dtype)
        if w is not None:
            summands.append((rows, w.T))
        grad_w = rows.mT @ gathered if gathered is not None else None
        grad_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    if grad_gathered is not None and w is not None:
        identity = torch.eye(w.shape[1], dtype=w.dtype, device=w.device)
        summands.append((grad_gathered, identity))
    if summands:
        left, right = (
            summands[0]
            if len(summands) == 1
            else (torch.cat(each, 1) for each in zip(*summands, strict=True))
        )
        grad_x = torch.ops.interlace.gemm_reduce_scatter(
            left, right, None, None, None, ctx.splits, ctx.dtype, ctx.group_name, ctx.impl, ""
        )
    return grad_x, grad_w, grad_bias, *[None] * 8


register(_library, "all_gather_gemm", _run, _fake, backward=_backward, setup_context=_setup_context)
