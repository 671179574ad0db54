"""Register operators with PyTorch: their kernels, their gradients, and their refusals."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import _C
from torch._library.utils import is_tensorlist_like_type
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from interlace.comm.groups.group import Group, known_group
from interlace.comm.groups.process_groups import default_group
from interlace.comm.replay import tapes
from interlace.comm.runtime.conditions import Condition, answers, by_id, has, returns
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

FROM_INDUCTOR = "from_inductor"
"""The attribute of an operator that is :meth:`Entrance.from_inductor`."""

_as_plain = _C.DisableTorchFunctionSubclass
"""The context in which tensors of subclasses, as parameters of engines are, are plain tensors:
otherwise PyTorch calls the subclass for each look at one, at its shape or its address.
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
    record: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    called: str = "",
) -> None:
    """Register the kernels of the operator ``interlace::<qualified_name>``, which ``library`` has
    defined; :func:`entrance` returns what calls it.

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
        record: Returns what records a call that goes past PyTorch's dispatcher, given what does so
            for any call; default: the latter.
        called: What users call to get the operator, for errors; default: the operator's name.
    """
    name, _, overload = qualified_name.partition(".")
    operator = getattr(getattr(torch.ops.interlace, name), overload or "default")

    def run_without_autograd(*args: Any) -> Any:
        if forward_ad._current_level >= 0:
            got = "a call inside of forward-mode differentiation"
            _refuse(called or name, " in forward mode", got, _WITHOUT_GRADIENT)
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            got = "an argument that requires a gradient"
            _refuse(called or name, ", as it has no gradient", got, _WITHOUT_GRADIENT)
        return run(*args)

    kernel = run_without_autograd if backward is None else run

    def run_on_plain_tensors(*args: Any) -> Any:
        with _as_plain():
            return kernel(*args)

    for device in ("CPU", "CUDA"):
        library.impl(qualified_name, run_on_plain_tensors, device)
    torch.library.register_fake(f"interlace::{qualified_name}", fake, lib=library)

    def run_without_autocast(*args: Any) -> Any:
        # Dispatch once more without autocast, which would cast the arguments.
        with _C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*args)

    for device in ("CPU", "CUDA"):
        library.impl(qualified_name, run_without_autocast, f"Autocast{device}")
    if backward is None:
        _enter_by(qualified_name, Entrance(operator, kernel))
        return
    record_call = _recorder(operator, backward, setup_context)

    def redispatch(keys: _C.DispatchKeySet, *args: Any) -> Any:
        return operator.redispatch(keys & _C._after_autograd_keyset, *args)

    def run_with_autograd(keys: _C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(
            tensor.is_floating_point() and forward_ad.unpack_dual(tensor).tangent is not None
            for tensor in _tensors(args)
        ):
            _refuse(name, " in forward mode", "an argument with a tangent")
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            if _C._are_functorch_transforms_active():
                _refuse(name, " by torch.func", "a call inside of grad, vjp or jacrev")
            return record_call(functools.partial(redispatch, keys), *args)
        # No argument requires a gradient, so the kernel is called without the cost of autograd.
        with _C._AutoDispatchBelowAutograd():
            return redispatch(keys, *args)

    library.impl(qualified_name, run_with_autograd, "Autograd", with_keyset=True)
    made = Entrance(operator, run)
    recorded: Callable[..., Any] = functools.partial(record_call, made.below_autograd)
    made.recorded = recorded if record is None else record(recorded)
    _enter_by(qualified_name, made)


def _keys_below_autograd() -> Any:
    """Return the keys that the dispatcher excludes below autograd."""
    with _C._AutoDispatchBelowAutograd():
        return _C._dispatch_tls_local_exclude_set()


_BELOW_AUTOGRAD = _keys_below_autograd() | _AUTOCAST
_IN_INFERENCE_MODE = _C.DispatchKeySet(_C.DispatchKey.BackendSelect)
# What the dispatcher includes on every thread where nothing listens; this module may be imported
# where something does.
_INCLUDED = (
    _IN_INFERENCE_MODE | _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView),
    _IN_INFERENCE_MODE,
)
_is_profiled = torch.autograd._profiler_enabled


def past_autograd() -> Any:
    """Return the context in which an implementation runs: below autograd, and without autocast."""
    return _C._ExcludeDispatchKeyGuard(_BELOW_AUTOGRAD)


def is_unobserved() -> bool:
    """Return whether nothing looks at calls of operators on this thread: no compiler, no mode of
    PyTorch's dispatcher or of its functions, no transform of ``torch.func`` and no profiler.
    """
    return (
        not torch.compiler.is_compiling()
        and not _is_profiled()
        and forward_ad._current_level < 0
        and _C._len_torch_function_stack() == 0
        and _C._get_tracing_state() is None
        and _C._dispatch_tls_local_include_set() in _INCLUDED
    )


def may_be_played(x: object) -> bool:
    """Return whether a call of a public function may be one that :func:`tapes.player` plays, given
    its first operand: on a GPU, where nothing looks at calls.
    """
    kind = type(x)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return False
    return x.is_cuda and is_unobserved()  # type: ignore[attr-defined]


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one whose memory kernels can read as it is: of no subclass, on a
    GPU or the CPU, and not one that PyTorch still has to negate.
    """
    kind = type(tensor)
    return (
        (kind is torch.Tensor or kind is torch.nn.Parameter)
        and (tensor.is_cuda or tensor.is_cpu)
        and not tensor.is_neg()
    )


def recalling_group(
    process_group: dist.ProcessGroup | None, x: torch.Tensor, *others: torch.Tensor | None
) -> Group | None:
    """Return the group of a call that ``Group.recall`` may find by its operands; None for a call
    that must take the long way: something listens to it, it needs a gradient, its group has not
    met, or an operand is no ordinary dense tensor on the GPU of the first.

    Nothing else is validated: a call whose operands and options are all equal to an earlier one's
    is as valid as that was.

    Args:
        process_group: The group as the caller has given it.
        x, others: The operands as the caller has given them; of the others, some may be None.
    """
    # First, as a compiler that traces this goes no further.
    if not is_unobserved():
        return None
    if torch.is_grad_enabled() and _C._any_requires_grad(x, *others):
        return None
    for operand in (x, *others):
        if operand is None and x is not None:
            continue
        kind = type(operand)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return None
        if not operand.is_cuda or operand.layout is not torch.strided or operand.is_neg():
            return None
        # What a call is known by does not say on which GPU each operand is.
        if operand.get_device() != x.get_device():
            return None
    return known_group(process_group, x.device)


def are_ordinary(args: Iterable[Any]) -> bool:
    """Return whether all tensors among arguments, and in lists and tuples of them, are what
    :func:`is_ordinary` says.
    """
    for value in args:
        if isinstance(value, torch.Tensor):
            if not is_ordinary(value):
                return False
        elif isinstance(value, (list, tuple)) and not are_ordinary(value):
            return False
    return True


class Entrance:
    """Call an operator at the least cost to the host.

    Where nothing looks at calls of operators it goes past PyTorch's dispatcher, whose way to a
    kernel in Python takes as long as a launch. A compiler, a mode, a transform or a profiler gets
    the operator itself.

    Attributes:
        operator: What the dispatcher knows.
        recorded: Calls the implementation and records it for autograd; None if it refuses gradients
            itself.
    """

    __slots__ = ("_arguments", "_is_played", "_play", "_run", "operator", "recorded")

    def __init__(self, operator: torch._ops.OpOverload, run: Callable[..., Any]) -> None:
        """Enter an operator.

        Args:
            operator: What the dispatcher knows.
            run: The implementation.
        """
        self.operator, self._run = operator, run
        self.recorded: Callable[..., Any] | None = None
        self._play: Callable[..., Any] | None = None
        self._arguments, self._is_played = len(operator._schema.arguments), False

    def __call__(self, *args: Any) -> Any:
        """Call the operator with its schema's arguments, all by position."""
        # It may say that it is complete, which of the call around it is not true.
        tapes.spoil("an operator is called by another")
        if is_unobserved() and are_ordinary(args):
            return self.past_dispatcher(*args)
        return self.operator(*args)

    def past_dispatcher(self, *args: Any) -> Any:
        """Call the operator where nothing listens, with ordinary tensors: see
        :func:`is_unobserved` and :func:`is_ordinary`.
        """
        recorded = self.recorded
        if recorded is not None and torch.is_grad_enabled() and _C._any_requires_grad(*args):
            return recorded(*args)
        with past_autograd():
            return self.below_autograd(*args)

    def below_autograd(self, *args: Any) -> Any:
        """Run the implementation within :func:`past_autograd`, by a tape where there is one."""
        # What another call is being recorded of has its tape.
        if tapes.recorder() is not None:
            return self._run(*args)
        if self._play is None:
            if not are_on_gpu(args):
                return self._run(*args)
            self._play = tapes.player(self._run)
        return self._play(*args)

    def from_inductor(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator from a program that Inductor has written, whose tensors are ordinary;
        see :mod:`interlace.compile.direct`.
        """
        # Neither a compiler nor a mode of PyTorch's functions listens in such a program.
        is_listening = _is_profiled() or _C._len_torch_dispatch_stack() > 0
        if kwargs or len(args) < self._arguments or is_listening or forward_ad._current_level >= 0:
            return self.operator(*args, **kwargs)
        if not self._is_played and are_on_gpu(args):
            self._is_played = True
            setattr(self.operator, FROM_INDUCTOR, tapes.player(self.from_inductor))
        with _as_plain():
            # An operator without a gradient refuses one itself: it need not be below autograd.
            return self._run(*args) if self.recorded is None else self.past_dispatcher(*args)


def are_on_gpu(args: Iterable[Any]) -> bool:
    """Return whether one of the arguments is a tensor on a GPU, as all operands of a call are."""
    kinds = torch.Tensor, torch.nn.Parameter
    return any(type(arg) in kinds and arg.is_cuda for arg in args)


def _conditions() -> Iterable[Condition]:
    """Return what a call past the dispatcher depends on beside its arguments and its group: nobody
    may listen, whether or not somebody does now.
    """
    yield answers(_is_profiled, False)
    yield answers(_C._len_torch_dispatch_stack, 0)
    yield "a", forward_ad, "_current_level", -1
    recorder = tapes.recorder()
    if recorder is None or not recorder.knows_gradients:
        yield returns(torch.is_grad_enabled)
    yield by_id(returns(default_group.get))
    # The property that the default group is, is looked up by functions of Python.
    world = dist.distributed_c10d._world
    yield by_id(has(dist.distributed_c10d, "_world"))
    is_there = hasattr(world, "_default_pg")
    yield by_id(has(world, "_default_pg") if is_there else has(dist.GroupMember, "WORLD"))


tapes.depend_on(_conditions)

_entrances: dict[str, Entrance] = {}


def _enter_by(qualified_name: str, made: Entrance) -> None:
    """Make an operator's entrance known, to its operator as well: Inductor's programs, which may
    come from a cache, say what they call by its name.
    """
    _entrances[qualified_name] = made
    setattr(made.operator, FROM_INDUCTOR, made.from_inductor)


def entrances() -> Iterable[Entrance]:
    """Return the entrances of all operators."""
    return _entrances.values()


def entrance(qualified_name: str) -> Entrance:
    """Return what calls ``torch.ops.interlace.<qualified_name>``."""
    return _entrances[qualified_name]


def _recorder(
    operator: torch._ops.OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None,
) -> Callable[..., Any]:
    """Return ``record(run, *args)``, which returns ``run(*args)`` with the formula of its gradient.

    It does what torch's own way does, which goes through the schema in every call for defaults that
    were left out; that takes the host 70 to 170 us. Autograd is given the tensors, those of lists
    one by one, as it looks into none, and everything else as one argument behind them. So its
    numbers of arguments are those of the schema where there are no lists.

    Raises:
        ArgumentError: Some tensors of the schema come behind other arguments.
    """
    kinds = ["Tensor" in str(argument.type) for argument in operator._schema.arguments]
    count = sum(kinds)
    if not all(kinds[:count]):
        raise ArgumentError(
            f"{operator}: tensors must be the first arguments of an operator with a gradient; got "
            f"{operator._schema}. Move the others behind them."
        )
    lists = [
        index
        for index, argument in enumerate(operator._schema.arguments)
        if is_tensorlist_like_type(argument.type)
    ]

    def compute(ctx: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        # By the dispatcher's way, too, an implementation runs below autograd and autocast.
        with past_autograd():
            output = run(*args)
            if setup_context is not None:
                setup_context(ctx=ctx, inputs=args, output=output)
        return output

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *flat: Any) -> Any:
            *tensors, (run, ctx.lengths, others) = flat
            if not lists:
                return compute(ctx, run, (*tensors, *others))
            with _needed(ctx, lists):
                return compute(ctx, run, (*_nested(tensors, lists, ctx.lengths), *others))

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
            with _needed(ctx, lists) if lists else _as_they_are:
                gradients = backward(ctx, *grads)
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            return *_flat(gradients[:count], lists, ctx.lengths), None

    Recorded.__name__ = Recorded.__qualname__ = f"Recorded_{operator._opname}"

    def record(run: Callable[..., Any], *args: Any) -> Any:
        tensors, lengths = args[:count], [len(args[index]) for index in lists] if lists else []
        others = run, lengths, args[count:]
        return Recorded.apply(*_flat(tensors, lists, lengths), others)  # type: ignore[no-untyped-call]

    return record


_as_they_are = contextlib.nullcontext()
"""What takes the place of :func:`_needed` where there are no lists."""


@contextlib.contextmanager
def _needed(ctx: Any, lists: Sequence[int]) -> Iterator[None]:
    """Show a gradient's formula which of its operator's arguments need one, lists as lists."""
    of_function = ctx.needs_input_grad
    ctx.needs_input_grad = _nested(of_function[:-1], lists, ctx.lengths)
    try:
        yield
    finally:
        ctx.needs_input_grad = of_function


def _nested(flat: Sequence[Any], lists: Sequence[int], lengths: Sequence[int]) -> tuple[Any, ...]:
    """Return an operator's arguments, of which ``flat`` has the lists' elements one by one.

    Args:
        lists: The places of lists among the arguments.
        lengths: The length of each of them.
    """
    if not lists:
        return tuple(flat)
    args = list(flat)
    for index, length in zip(lists, lengths, strict=True):
        args[index : index + length] = [args[index : index + length]]
    return tuple(args)


def _flat(args: Sequence[Any], lists: Sequence[int], lengths: Sequence[int]) -> list[Any]:
    """Return what :func:`_nested` takes; a list that is None has as many None as elements."""
    if not lists:
        return list(args)
    flat: list[Any] = []
    for index, value in enumerate(args):
        if index not in lists:
            flat.append(value)
        else:
            flat += [None] * lengths[lists.index(index)] if value is None else value
    return flat


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
        _refuse(ctx.operator, " twice", "a second derivative")


_IN_REVERSE = (
    "Use reverse mode, once (loss.backward()), or take the operator out of what is differentiated."
)
_WITHOUT_GRADIENT = (
    "Call it under torch.no_grad() or torch.inference_mode(), or give it detached arguments."
)


def _refuse(name: str, mode: str, got: str, advice: str = _IN_REVERSE) -> NoReturn:
    """Raise the error of an operator that cannot be differentiated in a mode.

    Args:
        name: The operator, or what users call.
        mode: Which derivative, or why, as it follows "differentiated".
        got: What asks for it.
        advice: What to do, as a sentence.
    """
    raise ArgumentError(
        f"{name}: this operator cannot be differentiated{mode}; got {got}. {advice}"
    )


def _tensors(args: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield all tensors among arguments and in nested lists and tuples of them."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
