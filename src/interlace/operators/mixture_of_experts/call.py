"""A call of ``mixture_of_experts``: its rules, what all ranks must agree on, what runs it, and
``torch.ops.interlace.mixture_of_experts``. Triton is imported by the first call.

The forward pass returns the tensors for the backward pass too: ``plan``, ``slot_rows``,
``slot_at``, ``received`` and ``kept`` (``layout.Saved``). They are empty if ``saves`` is false, and
else have the fused implementation's sizes, whichever runs: a graph that was compiled before the
ranks knew each other holds these sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import Group, group_named
from interlace.comm.groups.registration import (
    UNCAPTURABLE_TAGS,
    entrance,
    once_differentiable,
    register,
)
from interlace.comm.replay.replays import places
from interlace.comm.runtime import ranges
from interlace.errors import ArgumentError
from interlace.gemm import invariance
from interlace.gemm.dispatch import recall_key
from interlace.gemm.operands import (
    FLOAT8,
    FLOATS,
    integer,
    require_device,
    require_float,
    require_float8,
    require_kind,
    require_tensors,
)
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.mapped.meeting import compare_once
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.choice import ExpertTerms, decide
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.layout import (
    MAX_EXPERTS,
    MAX_RANKS,
    MAX_TOKENS,
    MAX_TOP_K,
    ExpertSizes,
    Order,
    Parameters,
    Saved,
    WeightScales,
    order_of,
)
from interlace.registry import Implementation, Operator, operator_named

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.kernels.activation import Form

BACKWARD = f"{OPERATOR}.backward"


def validate(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None,
    b_out: torch.Tensor | None,
    w_in_scale: torch.Tensor | None,
    w_out_scale: torch.Tensor | None,
    activation: ExpertActivation,
    capacity: object,
    world_size: int,
) -> int | None:
    """Refuse arguments that no rank could compute with; see
    :func:`interlace.mixture_of_experts` for the rules. Return the capacity as Python's number.
    """
    require_tensors(
        OPERATOR, ("b_in", "b_out", "w_in_scale", "w_out_scale"), x=x, experts=experts,
        weights=weights, w_in=w_in, w_out=w_out, b_in=b_in, b_out=b_out, w_in_scale=w_in_scale,
        w_out_scale=w_out_scale,
    )  # fmt: skip
    if x.dim() != 2:
        raise ArgumentError(f"{OPERATOR}: x must be [T, hidden]; got shape {list(x.shape)}.")
    tokens = x.shape[0]
    require_float(f"{OPERATOR}: x", x.dtype)
    if tokens > MAX_TOKENS:
        raise ArgumentError(
            f"{OPERATOR}: a rank must have at most {MAX_TOKENS} tokens; got {tokens}. Call in "
            "parts."
        )
    _validate_weights(w_in, w_out, b_in, b_out, x)
    if w_in.dtype == FLOAT8:
        _validate_float8(x, weights, w_in, w_out, b_in, b_out, w_in_scale, w_out_scale)
    elif w_in_scale is not None or w_out_scale is not None:
        raise ArgumentError(
            f"{OPERATOR}: w_in_scale and w_out_scale must be given for float8 weights only; w_in "
            f"is {w_in.dtype}."
        )
    if w_in.shape[2] == 1 and activation.needs_gate:
        raise ArgumentError(
            f"{OPERATOR}: activation must have no limit and no up_offset where experts have no "
            f"gate; got {activation}."
        )
    total = world_size * w_in.shape[0]
    if total > MAX_EXPERTS:
        raise ArgumentError(
            f"{OPERATOR}: all ranks together must have at most {MAX_EXPERTS} experts; got {total}."
        )
    if experts.dim() != 2 or experts.shape[0] != tokens:
        raise ArgumentError(
            f"{OPERATOR}: experts must be [T, k] with T = {tokens}; got shape "
            f"{list(experts.shape)}."
        )
    if experts.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"{OPERATOR}: experts must be int32 or int64; got {experts.dtype}.")
    top_k = experts.shape[1]
    # Slots may be empty, so a token may have more of them than there are experts.
    if not 1 <= top_k <= MAX_TOP_K:
        raise ArgumentError(
            f"{OPERATOR}: experts must have 1 to {MAX_TOP_K} slots for a token; got {top_k}."
        )
    if weights.shape != experts.shape or weights.dtype not in FLOATS:
        raise ArgumentError(
            f"{OPERATOR}: weights must be {list(experts.shape)}, like experts, of a floating "
            "dtype; "
            f"got {weights.dtype} {list(weights.shape)}."
        )
    for name, tensor in (("experts", experts), ("weights", weights)):
        require_device(f"{OPERATOR}: {name}", tensor, "x", x.device)
    if capacity is None:
        return None
    rows = integer(f"{OPERATOR}: capacity must be an integer, or None for no limit", capacity)
    if rows < 1:
        raise ArgumentError(
            f"{OPERATOR}: capacity must be positive, or None for no limit; got {rows}."
        )
    return rows


def _validate_weights(
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None,
    b_out: torch.Tensor | None,
    x: torch.Tensor,
) -> None:
    hidden = x.shape[1]
    if w_in.dim() != 4 or w_in.shape[2] not in (1, 2) or w_in.shape[3] != hidden:
        raise ArgumentError(
            f"{OPERATOR}: w_in must be [L, F, 2, hidden], gate and up of this rank's L experts, "
            f"with hidden = {hidden}, or [L, F, 1, hidden] without a gate; "
            f"got shape {list(w_in.shape)}. torch.stack([w_gate, w_up], dim=2) makes it of two "
            "[L, F, hidden]."
        )
    local, ffn, gates = w_in.shape[:3]
    if min(local, ffn, hidden) < 1:
        raise ArgumentError(
            f"{OPERATOR}: experts, F and hidden must be positive; got {local}, {ffn} and {hidden}."
        )
    for name, tensor, dimensions, shape in (
        ("w_out", w_out, "[L, hidden, F]", [local, hidden, ffn]),
        ("b_in", b_in, "[L, F, 2]" if gates == 2 else "[L, F, 1]", [local, ffn, gates]),
        ("b_out", b_out, "[L, hidden]", [local, hidden]),
    ):
        if tensor is not None and list(tensor.shape) != shape:
            raise ArgumentError(
                f"{OPERATOR}: {name} must be {dimensions} = {shape}; got shape "
                f"{list(tensor.shape)}."
            )
    dtype = FLOAT8 if w_in.dtype == FLOAT8 else x.dtype
    for name, tensor in (("w_in", w_in), ("w_out", w_out)):
        require_kind(f"{OPERATOR}: {name}", tensor, dtype, x.device, "x")
    for name, tensor in (("b_in", b_in), ("b_out", b_out)):
        if tensor is not None:
            require_kind(f"{OPERATOR}: {name}", tensor, x.dtype, x.device, "x")


def _validate_float8(
    x: torch.Tensor,
    weights: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None,
    b_out: torch.Tensor | None,
    w_in_scale: torch.Tensor | None,
    w_out_scale: torch.Tensor | None,
) -> None:
    local, ffn, gates, hidden = w_in.shape
    if x.dtype.itemsize != 2:
        raise ArgumentError(
            f"{OPERATOR}: x must be float16 or bfloat16 where weights are float8; got {x.dtype}."
        )
    if hidden % SCALE_BLOCK or ffn % SCALE_BLOCK or gates != 2:
        raise ArgumentError(
            f"{OPERATOR}: float8 experts must have gate and up, and hidden and F that are "
            f"multiples of {SCALE_BLOCK}; got w_in of shape {list(w_in.shape)}."
        )
    if order_of(w_in) != Order(True, True) or order_of(w_out) != Order(True, False):
        raise ArgumentError(
            f"{OPERATOR}: float8 w_in and w_out must be contiguous as [L, 2, F, hidden] and [L, "
            f"hidden, F] in memory; got strides {w_in.stride()} and {w_out.stride()}. "
            "torch.stack([w_gate, w_up], dim=1).transpose(1, 2) makes such a w_in."
        )
    if b_in is not None or b_out is not None:
        raise ArgumentError(f"{OPERATOR}: float8 experts must have no biases; got some.")
    if torch.is_grad_enabled():
        for name, operand in (("x", x), ("weights", weights), ("w_in", w_in), ("w_out", w_out)):
            if operand.requires_grad:
                raise ArgumentError(
                    f"{OPERATOR}: {name} must not require a gradient where weights are float8; got "
                    "one that does. Call it within torch.no_grad()."
                )
    blocks = [local, ffn // SCALE_BLOCK, gates, hidden // SCALE_BLOCK]
    for name, tensor, dimensions, shape in (
        ("w_in_scale", w_in_scale, "[L, F / 128, 2, hidden / 128]", blocks),
        ("w_out_scale", w_out_scale, "[L, hidden / 128, F / 128]", [local, blocks[3], blocks[1]]),
    ):
        if tensor is None or list(tensor.shape) != shape:
            found = "none" if tensor is None else f"shape {list(tensor.shape)}"
            raise ArgumentError(
                f"{OPERATOR}: {name} must be {dimensions} = {shape} for float8 weights; got "
                f"{found}."
            )
        require_kind(f"{OPERATOR}: {name}", tensor, torch.float32, x.device, "x")


@dataclasses.dataclass(eq=False)
class LayerCall:
    """One call whose shapes and devices are validated; implementations get it agreed on.

    Attributes:
        x, experts, weights, w_in, w_out, b_in, b_out: Those of ``interlace.mixture_of_experts``;
            weights are float32 and contiguous.
        capacity: Maximum number of rows that an expert takes from each rank.
        group_name: The name of the ranks' process group.
        impl: The implementation that the caller has named, or what chooses one.
        config: The text of a configuration; empty for that of the choice.
        activation: The text of an ``ExpertActivation``.
        keeps: Whether a backward pass will follow.
        saves: Whether tensors for it are results. If not, it computes them anew.
        known: By what ``Group.recall`` finds the pass when it comes again; None for nothing.
        w_in_scale, w_out_scale: Those of ``interlace.mixture_of_experts``.
        mark: The number that this call's signals carry; 0 until :meth:`agree`.
    """

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    w_in: torch.Tensor
    w_out: torch.Tensor
    b_in: torch.Tensor | None
    b_out: torch.Tensor | None
    capacity: int
    group_name: str
    impl: str
    config: str
    activation: str
    keeps: bool
    saves: bool
    known: Hashable = None
    w_in_scale: torch.Tensor | None = None
    w_out_scale: torch.Tensor | None = None
    mark: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        dtypes = [tensor.dtype for tensor in (self.x, *self.parameters) if tensor is not None]
        if len(set(dtypes)) > 1 and not self.is_float8:
            raise ArgumentError(
                f"{OPERATOR}: x, weights and biases must have the same dtype; got {dtypes}. "
                "Convert them."
            )

    @property
    def parameters(self) -> Parameters:
        """The experts' weights and biases."""
        return Parameters(self.w_in, self.w_out, self.b_in, self.b_out)

    @property
    def is_float8(self) -> bool:
        """Whether weights are float8, with scales of blocks."""
        return self.w_in.dtype == FLOAT8

    @functools.cached_property
    def weight_scales(self) -> WeightScales | None:
        """The scales of float8 weights as kernels read them: copies where they lie otherwise."""
        if self.w_in_scale is None or self.w_out_scale is None:
            return None
        of_in = self.w_in_scale.transpose(1, 2).contiguous().transpose(1, 2)
        return WeightScales(of_in, self.w_out_scale.contiguous())

    @property
    def operator(self) -> Operator:
        """The operator's declaration."""
        return operator_named(OPERATOR)

    def memory(self) -> tuple[Hashable, ...]:
        """Return where the operands lie and all settings, for the key of a replay."""
        tensors = (
            self.x, self.experts, self.weights, *self.parameters, self.w_in_scale, self.w_out_scale,
        )  # fmt: skip
        return *places(*tensors), self.capacity, self.activation, self.saves, self.chosen[1]

    @functools.cached_property
    def form(self) -> Form:
        """The constants by which kernels know the activation."""
        return _form(self.sizes.gates, order_of(self.w_in).halves, self.activation)

    @functools.cached_property
    def group(self) -> Group:
        return group_named(self.group_name, self.x.device)

    @functools.cached_property
    def sizes(self) -> ExpertSizes:
        ranks = self.group.world_size
        return ExpertSizes.of(self.x, self.experts, self.w_in, ranks, self.capacity)

    def agree(self, operator: str) -> None:
        """Agree on this call with all ranks, which gives it its mark: within a node once for all
        numbers of tokens, of which a server sees hundreds. Where a stock pair's exchanges would not
        find out that these differ, ranks compare them on their GPUs.
        """
        group, (tokens, hidden) = self.group, self.x.shape
        group.check()
        group.require_size(OPERATOR, MAX_RANKS)
        first = {"the_shape_of_x": (tokens, hidden), "capacity": self.capacity}
        shared = {
            # One that drops nothing follows from the tokens.
            "capacity": self.capacity if self.capacity < tokens else None,
            "top_k": self.experts.shape[1],
            "experts_of_a_rank": self.w_in.shape[0],
            "the_hidden_width": hidden,
            "the_inner_width": self.w_in.shape[1],
            "whether_experts_have_a_gate": self.w_in.shape[2] == 2,
            "dtype": str(self.x.dtype),
            "dtype_of_the_weights": str(self.w_in.dtype),
            "which_biases_there_are": tuple(
                name for name in ("b_in", "b_out") if getattr(self, name) is not None
            ),
            "activation": self.activation,
            "whether_gradients_are_needed": self.keeps,
            "whether_tensors_are_saved": self.saves,
            "impl": self.impl,
            "config": self.config,
        }
        self.mark, family = group.agreement.agree_on_sizes(operator, shared, first, tokens)
        if self.operator.is_pair(self.implementation.name):
            compare_once(group, family, operator, tokens)

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return the range of this call for profilers, by the name of the operator or its half.

        The bytes that it sends are unknown: only the device knows how many rows go where.
        """
        operands = (self.x, self.experts, self.w_in, self.w_out)
        return ranges.around(name, self.implementation.name, operands, lambda: None)

    @functools.cached_property
    def terms(self) -> ExpertTerms:
        """The properties of this call by which implementations may refuse it."""
        return ExpertTerms(
            self.sizes, self.x.dtype, self.x.device.type, self.keeps, self.group.nodes,
            self.is_float8,
        )  # fmt: skip

    @functools.cached_property
    def chosen(self) -> tuple[str, MixtureOfExpertsConfig]:
        """The implementation and the configuration of this call.

        Raises:
            ArgumentError: The implementation was asked for and cannot run such a call.
            BackendError: Weights are float8, and the GPU multiplies no such numbers.
        """
        if self.is_float8:
            require_float8(OPERATOR, self.x.device)
        terms, device = self.terms, self.x.device
        choice = decide(terms, device, self.impl)
        chosen = self.operator.implementation(choice.impl)
        if self.impl == "auto" and self.group.shortage(lambda: chosen.reservation(terms)):
            choice = decide(terms, device, "unfused")
        if self.config:
            config = MixtureOfExpertsConfig.parse(self.config)
            if self.is_float8:
                config.require_blocks(choice.impl)
            return choice.impl, config
        return choice.impl, choice.config

    @functools.cached_property
    def implementation(self) -> Implementation:
        """The implementation that runs this call: the chosen one, if there are rows to send."""
        # All ranks have the same number of tokens, so they leave the chosen one together.
        name = self.chosen[0] if self.sizes.tokens else "unfused"
        return self.operator.implementation(name)

    @property
    def new(self) -> Callable[..., torch.Tensor]:
        """The function that makes new tensors of this call."""
        # On the CPU backend memory without rows is zero, so that torch's checks compare equal
        # numbers.
        return torch.zeros if self.group.backend == "cpu" else torch.empty

    def unused(self) -> Saved:
        """Return the saved tensors of a call whose backward pass needs only their shapes."""
        return Saved.empty(self.sizes, self.x, self.saves, self.new)


@functools.cache
def _form(gates: int, halves: bool, activation: str) -> Form:
    from interlace.operators.mixture_of_experts.kernels.activation import Form

    return Form(gates, halves, *dataclasses.astuple(ExpertActivation.parse(activation)))


def run(call: LayerCall) -> tuple[torch.Tensor, Saved]:
    """Run the forward pass; return ``y [T, hidden]`` and the tensors for the backward pass.

    Raises:
        ArgumentError: The call cannot run by the implementation that was asked for, or be
            batch-invariant.
    """
    call.agree(OPERATOR)
    with call.range(OPERATOR):
        outcome = call.implementation.run(call)
        result: tuple[torch.Tensor, Saved] = call.group.perform(outcome, call.known)
    return result


def run_backward(
    call: LayerCall, grad: torch.Tensor, saved: Saved, needed: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of x, weights, w_in, w_out, b_in and b_out.

    The last four are empty unless they are ``needed``.
    """
    call.agree(BACKWARD)
    backward = call.implementation.backward
    assert backward is not None  # the others refuse calls that keep tensors for it
    with call.range(BACKWARD):
        outcome = backward(call, grad, saved, needed)
        gradients: tuple[torch.Tensor, ...] = call.group.perform(outcome, call.known)
    return gradients


# The operators of torch

_library = torch.library.Library("interlace", "FRAGMENT")
_INPUTS = (
    "Tensor x, Tensor experts, Tensor weights, Tensor w_in, Tensor w_out, Tensor? b_in, "
    "Tensor? b_out"
)
_OPTIONS = "int world_size, SymInt capacity, str group_name, str impl, str config, str activation"
_SCALES = "Tensor? w_in_scale, Tensor? w_out_scale"
_TENSORS, _NUMBERS = 7, 6  # how many arguments the inputs and the options are
_GROUP_NAME = 2  # which option it is
_SAVED = "Tensor plan, Tensor slot_rows, Tensor slot_at, Tensor received, Tensor kept"
# The unfused implementation, which a tuned table may choose, waits for the device where it runs one
# expert after another, so no CUDA graph can hold the operators.
_library.define(
    f"mixture_of_experts({_INPUTS}, {_SCALES}, {_OPTIONS}, bool keeps, bool saves) -> (Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=UNCAPTURABLE_TAGS,
)
_library.define(
    f"mixture_of_experts_backward(Tensor grad, {_INPUTS}, {_SAVED}, {_OPTIONS}, bool[] needed) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=UNCAPTURABLE_TAGS,
)


def _call(inputs: Sequence[Any], options: Sequence[Any], *others: Any) -> LayerCall:
    """Return the call of both operators' tensors and options, in the schemas' order, and of the
    fields behind them.
    """
    # The group says how many ranks there are.
    return LayerCall(*inputs, *options[1:], *others)


def _run(*arguments: Any) -> tuple[torch.Tensor, ...]:
    *tensors, keeps, saves = arguments
    tensors, options = tensors[:-_NUMBERS], tensors[-_NUMBERS:]
    known = recall_key(OPERATOR, tensors, *options, keeps, saves)
    if known is not None:
        result = group_named(options[_GROUP_NAME], tensors[0].device).recall(known)
        if result is not None:
            y, saved = result
            return y, *saved
    call = _call(tensors[:_TENSORS], options, keeps, saves, known, *tensors[_TENSORS:])
    impl = invariance.effective_impl(operator_named(OPERATOR), call.impl)
    y, saved = run(call if impl == call.impl else dataclasses.replace(call, impl=impl))
    return y, *saved


def _fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    x, experts, _, w_in, *_ = arguments[:_TENSORS]
    *_, saves = arguments
    world_size, capacity, *_ = arguments[-_NUMBERS - 2 :]
    saved = Saved.empty(ExpertSizes.of(x, experts, w_in, world_size, capacity), x, saves)
    return torch.empty_like(x, memory_format=torch.contiguous_format), *saved


def _run_backward(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, (*options, needed) = arguments[: -_NUMBERS - 1], arguments[-_NUMBERS - 1 :]
    known = recall_key(BACKWARD, (grad, *tensors), *options, needed)
    if known is not None:
        group = group_named(options[_GROUP_NAME], grad.device)
        gradients: tuple[torch.Tensor, ...] | None = group.recall(known)
        if gradients is not None:
            return gradients
    saved = Saved(*tensors[_TENSORS:])
    call = _call(tensors[:_TENSORS], options, True, saved.plan.numel() > 0, known)
    return run_backward(call, grad, saved, needed)


def _fake_backward(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    x, _, weights, *parameters = arguments[:_TENSORS]
    like = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, weights)
    ]
    return *like, *Parameters._make(parameters).gradients(arguments[-1])


# Autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:_TENSORS], inputs[-_NUMBERS - 2 : -2]
    _, *saved = output
    # They are results only so that a graph may keep them until the backward pass.
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *saved)


@once_differentiable("mixture_of_experts")
def _backward(ctx: Any, grad: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    nothing: list[Any] = [None] * (2 + _NUMBERS + 2)  # the scales and the options
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
