"""How the operators are registered with PyTorch: their kernels, their gradients, and what they
refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import _C
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from interlace.errors import ArgumentError

OPERATOR_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""Tags of every operator.

Not in CUDA graphs that Inductor makes by itself (``mode="reduce-overhead"``): during its warm-up it
takes all memory from the graph's pool, also what an operator keeps from call to call, and refuses
to replay. Inductor cuts its graphs there. Graphs that a program captures itself hold the operators,
after one call outside.
"""

_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU) | _C.DispatchKeySet(
    _C.DispatchKey.AutocastCUDA
)


def register(
    library: torch.library.Library,
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Register the kernels of the operator ``interlace::<name>``, which ``library`` has defined.

    No derivative is ever lost without a word. Forward-mode differentiation is refused, and so is
    reverse mode where there is no ``backward``. Autocast does not reach into an operator: it runs
    in the dtypes of its arguments.

    Args:
        library: Where the schema was defined.
        name: The operator's name.
        run: The implementation, on the CPU and on CUDA.
        fake: The shapes and dtypes of the results.
        backward: The gradient's formula, as for ``torch.library.register_autograd``. None for
            operators that are only called after autograd, by a gradient's formula or by a compiled
            graph; they cost the host less.
        setup_context: What ``backward`` needs to be saved, as for
            ``torch.library.register_autograd``.
    """
    operator = getattr(torch.ops.interlace, name).default

    def run_without_autograd(*args: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse(name, "in forward mode", "a call inside of forward-mode differentiation")
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            _refuse(name, "at all", "an argument that requires a gradient")
        return run(*args)

    kernel = run_without_autograd if backward is None else run
    for device in ("CPU", "CUDA"):
        library.impl(name, kernel, device)
    torch.library.register_fake(f"interlace::{name}", fake, lib=library)

    def run_without_autocast(*args: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*args)

    for device in ("CPU", "CUDA"):
        library.impl(name, run_without_autocast, f"Autocast{device}")
    if backward is None:
        return
    differentiable = make_autograd_impl(operator, Info(backward, setup_context))

    def run_with_autograd(keys: _C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, _tensors(args))):
            _refuse(name, "in forward mode", "an argument with a tangent")
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            return differentiable(keys, *args)
        with _C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & _C._after_autograd_keyset, *args)

    library.impl(name, run_with_autograd, "Autograd", with_keyset=True)


def once_differentiable(operator: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a ``backward`` whose results cannot be differentiated again.

    As ``torch.autograd.function.once_differentiable``, but the error names the operator, and it
    also comes where a result depends on nothing but tensors that were saved. It comes when a second
    derivative is asked for, not when a program keeps the graph of the first one.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        def once(ctx: Any, *grads: torch.Tensor | None) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                results = backward(ctx, *grads)
            inputs = [
                tensor for tensor in _tensors([*grads, *ctx.saved_tensors]) if tensor.requires_grad
            ]
            if not inputs:
                return results

            def refuse_another(result: torch.Tensor) -> torch.Tensor:
                connected: torch.Tensor = _OnceDifferentiable.apply(operator, result, *inputs)  # type: ignore[no-untyped-call]
                return connected

            return tree_map_only(torch.Tensor, refuse_another, results)

        return once

    return decorate


class _OnceDifferentiable(torch.autograd.Function):
    """The identity of a result that depends on ``inputs``; its gradient is an error."""

    @staticmethod
    def forward(
        ctx: Any, operator: str, result: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.operator = operator
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        _refuse(ctx.operator, "twice", "a second derivative")


def _refuse(name: str, how: str, got: str) -> NoReturn:
    raise ArgumentError(
        f"{name}: this operator cannot be differentiated {how}; got {got}. "
        "Use reverse mode, once (loss.backward()), or take the operator out of what is "
        "differentiated."
    )


def _tensors(args: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _has_tangent(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and forward_ad.unpack_dual(tensor).tangent is not None
