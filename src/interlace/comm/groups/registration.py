"""Register operators with PyTorch: their kernels, their gradients, and their refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import _C
from torch._library.autograd import Info, make_autograd_impl
from torch._library.utils import is_tensorlist_like_type
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from interlace.errors import ArgumentError

OPERATOR_TAGS = (torch.Tag.pt2_compliant_tag,)
"""Tags of operators that CUDA graphs may hold, also those that Inductor makes by itself
(``mode="reduce-overhead"``): their first call with new shapes exchanges and allocates what is
needed, and later ones ask neither the host nor a peer's host for anything.
"""

UNCAPTURABLE_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""Tags of operators whose calls need the host each time, at which Inductor cuts its graphs: ranks
exchange something in every call, or the host waits for the device. A replay would leave that out.
"""

_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU) | _C.DispatchKeySet(
    _C.DispatchKey.AutocastCUDA
)


def register(
    library: torch.library.Library,
    qualified_name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Register the kernels of the operator ``interlace::<qualified_name>``, which ``library`` has
    defined.

    Derivatives are computed or refused with an error, never dropped. Forward-mode differentiation
    is refused, and so is reverse mode if there is no ``backward``. Autocast does not reach into an
    operator: it runs in the dtypes of its arguments.

    Args:
        library: Library in which the schema was defined.
        qualified_name: The operator's name, with a dot and its overload's name if it has one.
        run: The implementation, on the CPU and on CUDA.
        fake: Returns empty tensors of the results' shapes and dtypes.
        backward: The gradient's formula, as for ``torch.library.register_autograd``. None for
            operators that are only called after autograd, by a gradient's formula or by a compiled
            graph; they cost the host less.
        setup_context: Saves the tensors that ``backward`` needs, as for
            ``torch.library.register_autograd``.
    """
    name, _, overload = qualified_name.partition(".")
    operator = getattr(getattr(torch.ops.interlace, name), overload or "default")

    def run_without_autograd(*args: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse(name, "in forward mode", "a call inside of forward-mode differentiation")
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            _refuse(name, "at all", "an argument that requires a gradient")
        return run(*args)

    kernel = run_without_autograd if backward is None else run
    for device in ("CPU", "CUDA"):
        library.impl(qualified_name, kernel, device)
    torch.library.register_fake(f"interlace::{qualified_name}", fake, lib=library)

    def run_without_autocast(*args: Any) -> Any:
        # Dispatch once more without autocast, which would cast the arguments.
        with _C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*args)

    for device in ("CPU", "CUDA"):
        library.impl(qualified_name, run_without_autocast, f"Autocast{device}")
    if backward is None:
        return
    differentiable = _differentiable(operator, backward, setup_context)

    def run_with_autograd(keys: _C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, _tensors(args))):
            _refuse(name, "in forward mode", "an argument with a tangent")
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            if _C._are_functorch_transforms_active():
                _refuse(name, "by torch.func", "a call inside of grad, vjp or jacrev")
            return differentiable(keys, *args)
        # No argument requires a gradient, so the kernel is called without the cost of autograd.
        with _C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & _C._after_autograd_keyset, *args)

    library.impl(qualified_name, run_with_autograd, "Autograd", with_keyset=True)


def _differentiable(
    operator: torch._ops.OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None,
) -> Callable[..., Any]:
    """Return the kernel of an operator that records its gradient's formula.

    It does what torch's own does, which goes through the schema in every call for defaults that
    were left out; that takes the host 70 to 170 us.
    """
    arguments, results = operator._schema.arguments, operator._schema.returns
    has_lists = any(is_tensorlist_like_type(each.type) for each in (*arguments, *results))
    if has_lists or any(each.kwarg_only or each.has_default_value() for each in arguments):
        return make_autograd_impl(operator, Info(backward, setup_context))

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, keys = args
            with _C._AutoDispatchBelowAutograd():
                output = operator.redispatch(keys & _C._after_autograd_keyset, *inputs)
                if setup_context is not None:
                    setup_context(ctx=ctx, inputs=tuple(inputs), output=output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
            all_inputs = ctx.needs_input_grad
            # The formula knows nothing of the keys behind its operator's arguments.
            ctx.needs_input_grad = all_inputs[:-1]
            try:
                found = backward(ctx, *grads)
            finally:
                ctx.needs_input_grad = all_inputs
            return (*found, None) if isinstance(found, tuple) else (found, None)

    Recorded.__name__ = Recorded.__qualname__ = f"Recorded_{operator._opname}"

    def run(keys: _C.DispatchKeySet, *args: Any) -> Any:
        return Recorded.apply(*args, keys)  # type: ignore[no-untyped-call]

    return run


def once_differentiable(operator: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a ``backward`` whose results cannot be differentiated again.

    It differs from ``torch.autograd.function.once_differentiable`` in two points: the error names
    the operator, and it is also raised if a result depends on saved tensors only. The error is
    raised when a second derivative is computed, not when a program keeps the graph of the first.

    Args:
        operator: Name of the operator, for the error.
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

            # Connect each result to the inputs by a function whose gradient is the error, so that a
            # second derivative is refused and not zero.
            def refuse_derivative(result: torch.Tensor) -> torch.Tensor:
                connect: Callable[..., torch.Tensor] = _OnceDifferentiable.apply
                return connect(operator, result, *inputs)

            return tree_map_only(torch.Tensor, refuse_derivative, results)

        return once

    return decorate


class _OnceDifferentiable(torch.autograd.Function):
    """Return a result unchanged and make its gradient an error."""

    @staticmethod
    def forward(
        ctx: Any, operator: str, result: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.operator = operator
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        _refuse(ctx.operator, "twice", "a second derivative")


def _refuse(name: str, mode: str, got: str) -> NoReturn:
    """Raise the error of an operator that cannot be differentiated in a mode."""
    raise ArgumentError(
        f"{name}: this operator cannot be differentiated {mode}; got {got}. "
        "Use reverse mode, once (loss.backward()), or take the operator out of what is "
        "differentiated."
    )


def _tensors(args: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield all tensors among arguments and in nested lists and tuples of them."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether forward-mode differentiation tracks the tensor."""
    return tensor.is_floating_point() and forward_ad.unpack_dual(tensor).tangent is not None
