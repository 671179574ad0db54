"""``torch.ops.interlace.linear_cross_entropy``. Triton is imported by the first call.

Of a loss that is one number, the forward pass computes the gradients too, as it has the logits
then: they are results of the operator, and the backward pass multiplies them by the loss's own
gradient. Of a loss for each row the backward pass computes the logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.groups.registration import (
    OPERATOR_TAGS,
    entrance,
    is_unobserved,
    once_differentiable,
    register,
)
from interlace.mapped.meeting import compare_once
from interlace.operators.linear_cross_entropy.call import OPERATOR, LossCall, LossGradients, Options
from interlace.operators.linear_cross_entropy.fused import multiply

_library = torch.library.Library("interlace", "FRAGMENT")
_OPTIONS = (
    "SymInt vocabulary, int ignore_index, float label_smoothing, float z_loss, str reduction, "
    "bool sequence_parallel, SymInt chunk_rows, str group_name, str impl, bool[] needed"
)
# A PyTorch that does not say so may need the gradients again.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_TENSORS, _OTHERS = 4, 10  # how many arguments these are
_library.define(
    f"{OPERATOR}(Tensor x, Tensor w, Tensor target, Tensor? bias, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=OPERATOR_TAGS,
)
_library.define(
    f"{OPERATOR}_backward(Tensor grad, Tensor x, Tensor w, Tensor target, Tensor? bias, Tensor "
    f"log_sums, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=OPERATOR_TAGS,
)


def _call(tensors: Any, others: Any, scale: torch.Tensor, *, computes: bool) -> LossCall:
    """Return the call of both operators' arguments.

    Args:
        computes: Whether this pass computes gradients.
    """
    *options, group_name, impl, needed = others
    x, w, target, bias = tensors
    needs_x, needs_w, needs_bias = (computes and need for need in needed)
    return LossCall(
        x, w, target, bias, Options(*options), scale, needs_x, needs_w, needs_bias, group_name,
        impl,
    )  # fmt: skip


def _results(call: LossCall, gradients: LossGradients) -> tuple[torch.Tensor, ...]:
    """Return gradients as results of an operator, empty where there is none."""
    return tuple(call.x.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _agree(call: LossCall, step: str) -> None:
    """Agree on a pass with all ranks; stock collectives would not find out that rows differ."""
    family = call.agree(step)
    if call.implementation.name == "unfused":
        compare_once(call.group, family, OPERATOR, call.target.numel())


def _run(*arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, others = arguments[:_TENSORS], arguments[_TENSORS:]
    x, _, target, _ = tensors
    options = Options(*others[:-3])
    one = torch.ones(1, dtype=torch.float32, device=x.device)
    scale = one
    if options.reduction == "mean":
        scale = one / (target != options.ignore_index).sum()
    # In float16 the gradients of a mean would vanish before a program's own scale reaches them.
    is_scaled = x.dtype != torch.float16
    call = _call(tensors, others, scale if is_scaled else one, computes=options.reduction != "none")
    _agree(call, "forward")
    with call.range(OPERATOR):
        losses, log_sums, gradients = call.implementation.run(call)
    if options.reduction != "none":
        losses = losses.sum() * scale[0]
    return losses, log_sums, one if is_scaled else scale.clone(), *_results(call, gradients)


def _fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    x, _, target, _ = arguments[:_TENSORS]
    needed = arguments[-1]
    reduction = Options(*arguments[_TENSORS:-3]).reduction
    losses = x.new_empty(target.shape if reduction == "none" else [], dtype=torch.float32)
    if reduction == "none":
        needed = [False] * len(needed)
    gradients = _fake_gradients(arguments[:_TENSORS], needed)
    numbers = (x.new_empty(shape, dtype=torch.float32) for shape in (target.shape, [1]))
    return losses, *numbers, *gradients


def _fake_gradients(tensors: Any, needed: Any) -> tuple[torch.Tensor, ...]:
    x, w, _, bias = tensors
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else x.new_empty(0)
        for tensor, need in zip((x, w, bias), needed, strict=True)
    )


def _run_backward(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *tensors, log_sums = arguments[: _TENSORS + 1]
    call = _call(tensors, arguments[_TENSORS + 1 :], grad.contiguous(), computes=True)
    _agree(call, "backward")
    backward = call.implementation.backward
    assert backward is not None
    with call.range(f"{OPERATOR}.backward"):
        return _results(call, backward(call, log_sums))


def _fake_backward(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    return _fake_gradients(arguments[:_TENSORS], arguments[-1])


# Autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.others = inputs[_TENSORS:]
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    log_sums, *computed = saved
    if Options(*ctx.others[:-3]).reduction == "none":
        ctx.save_for_backward(*inputs[:_TENSORS], log_sums)
    else:
        ctx.save_for_backward(*computed)


@once_differentiable(OPERATOR)
def _backward(ctx: Any, grad: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    gradients: Any = (None, None, None)
    if grad is not None and Options(*ctx.others[:-3]).reduction == "none":
        gradients = entrance(f"{OPERATOR}_backward")(grad, *ctx.saved_tensors, *ctx.others)
    elif grad is not None:
        remaining, *computed = ctx.saved_tensors
        gradients = _multiplied(computed, grad * remaining[0])
    x, w, bias = (
        gradient if need else None for gradient, need in zip(gradients, ctx.others[-1], strict=True)
    )
    return x, w, None, bias, *[None] * _OTHERS


def _multiplied(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients times a factor, in their own memory if nobody needs it again."""
    if not is_unobserved() or _keeps_graph():
        return [gradient * factor for gradient in gradients]
    multiply(LossGradients(*gradients), factor)
    # Autograd copies a tensor that is saved as well, unless it comes as a view.
    return [gradient.view_as(gradient) for gradient in gradients]


register(_library, OPERATOR, _run, _fake, backward=_backward, setup_context=_setup_context)
register(_library, f"{OPERATOR}_backward", _run_backward, _fake_backward)
