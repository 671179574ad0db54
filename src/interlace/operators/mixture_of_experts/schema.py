"""``torch.ops.interlace.mixture_of_experts``: schema, shape inference, gradient. Triton is imported
by the first call.

The forward pass returns the tensors for the backward pass too: ``plan``, ``slot_rows``,
``slot_at``, ``received`` and ``kept`` (``layout.Saved``). They are empty if ``saves`` is false, and
else have the fused implementation's sizes, whichever runs: a graph that was compiled before the
ranks knew each other holds these sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm import group_named
from interlace.comm.groups.registration import (
    UNCAPTURABLE_TAGS,
    entrance,
    once_differentiable,
    register,
)
from interlace.comm.replay.replays import places
from interlace.comm.runtime import ranges
from interlace.gemm import invariance
from interlace.gemm.invariance import effective_impl
from interlace.operators.mixture_of_experts.call import LayerCall, run, run_backward
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.operators.mixture_of_experts.layout import ExpertSizes, Parameters, Saved
from interlace.registry import operator_named

_library = torch.library.Library("interlace", "FRAGMENT")
_INPUTS = (
    "Tensor x, Tensor experts, Tensor weights, Tensor w_in, Tensor w_out, Tensor? b_in, "
    "Tensor? b_out"
)
_OPTIONS = "int world_size, SymInt capacity, str group_name, str impl, str config, str activation"
_TENSORS, _NUMBERS = 7, 6  # how many arguments these are
_GROUP_NAME = 9  # which argument it is
_SAVED = "Tensor plan, Tensor slot_rows, Tensor slot_at, Tensor received, Tensor kept"
# The unfused implementation, which a tuned table may choose, waits for the device, so no CUDA graph
# can hold the operators.
_library.define(
    f"mixture_of_experts({_INPUTS}, {_OPTIONS}, bool keeps, bool saves) -> (Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor)",
    tags=UNCAPTURABLE_TAGS,
)
_library.define(
    f"mixture_of_experts_backward(Tensor grad, {_INPUTS}, {_SAVED}, {_OPTIONS}, bool[] needed) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=UNCAPTURABLE_TAGS,
)

Tensors = tuple[torch.Tensor, ...]


def _known(operator: str, tensors: Sequence[torch.Tensor | None], *others: Any) -> Any:
    """Return by what ``Group.recall`` finds a pass of these arguments; None where it is not to
    look: on a CPU, and while a profiler listens.
    """
    assert tensors[0] is not None
    if not tensors[0].is_cuda or ranges.is_listening():
        return None
    return operator, *places(*tensors), invariance.is_enabled(), *others


def _call(inputs: Sequence[Any], keeps: bool, saves: bool, known: Any) -> LayerCall:
    """Return the call of both operators' tensors and options, in the schemas' order."""
    # The group says how many ranks there are.
    tensors, (_, *options) = inputs[:_TENSORS], inputs[_TENSORS:]
    return LayerCall(*tensors, *options, keeps, saves, known)


def _run(*arguments: Any) -> Tensors:
    *inputs, keeps, saves = arguments
    known = _known(OPERATOR, inputs[:_TENSORS], *inputs[_TENSORS:], keeps, saves)
    if known is not None:
        found = group_named(inputs[_GROUP_NAME], inputs[0].device).recall(known)
        if found is not None:
            y, saved = found
            return y, *saved
    call = _call(inputs, keeps, saves, known)
    impl = effective_impl(operator_named(OPERATOR), call.impl)
    y, saved = run(call if impl == call.impl else dataclasses.replace(call, impl=impl))
    return y, *saved


def _fake(*arguments: Any) -> Tensors:
    x, experts, _, w_in, *_ = arguments[:_TENSORS]
    *options, _, saves = arguments[_TENSORS:]
    world_size, capacity, *_ = options
    saved = Saved.empty(ExpertSizes.of(x, experts, w_in, world_size, capacity), x, saves)
    return torch.empty_like(x, memory_format=torch.contiguous_format), *saved


def _run_backward(grad: torch.Tensor, *arguments: Any) -> Tensors:
    tensors, (*options, needed) = arguments[: -_NUMBERS - 1], arguments[-_NUMBERS - 1 :]
    known = _known(f"{OPERATOR}.backward", (grad, *tensors), *options, tuple(needed))
    inputs = [*tensors[:_TENSORS], *options]
    if known is not None:
        group = group_named(inputs[_GROUP_NAME], grad.device)
        gradients: Tensors | None = group.recall(known)
        if gradients is not None:
            return gradients
    saved = Saved(*tensors[_TENSORS:])
    call = _call(inputs, True, saved.plan.numel() > 0, known)
    return run_backward(call, grad, saved, needed)


def _fake_backward(grad: torch.Tensor, *arguments: Any) -> Tensors:
    x, _, weights, *parameters = arguments[:_TENSORS]
    like = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, weights)
    ]
    return *like, *Parameters._make(parameters).gradients(arguments[-1])


# Autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    tensors, ctx.options = inputs[:_TENSORS], inputs[_TENSORS:-2]
    _, *saved = output
    # They are results only so that a graph may keep them until the backward pass.
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *saved)


@once_differentiable("mixture_of_experts")
def _backward(ctx: Any, grad: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    nothing: list[Any] = [None] * (_NUMBERS + 2)
    if grad is None:
        return *([None] * _TENSORS), *nothing
    tensors = ctx.saved_tensors
    need_x, _, need_weights, *needed = ctx.needs_input_grad[:_TENSORS]
    x, weights, *parameters = entrance("mixture_of_experts_backward")(
        grad, *tensors, *ctx.options, needed
    )
    return (
        x if need_x else None,
        None,
        weights if need_weights else None,
        *(gradient if need else None for gradient, need in zip(parameters, needed, strict=True)),
        *nothing,
    )


register(
    _library, "mixture_of_experts", _run, _fake, backward=_backward, setup_context=_setup_context
)
register(_library, "mixture_of_experts_backward", _run_backward, _fake_backward)
