"""``torch.ops.interlace.*`` of operators around a matrix product: schema, shapes, gradient.

Triton is imported by the first call, not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import default_name
from interlace.comm.groups.registration import (
    OPERATOR_TAGS,
    UNCAPTURABLE_TAGS,
    Entrance,
    entrance,
    is_ordinary,
    is_unobserved,
    may_be_played,
    past_autograd,
    recalling_group,
    register,
)
from interlace.comm.replay import tapes
from interlace.errors import ArgumentError
from interlace.gemm import dispatch
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import (
    Operands,
    output_dtype,
    require_kind,
    require_tensor,
    validate,
)
from interlace.gemm.operator import GemmOperator, product_operator
from interlace.gemm.scaled import has_wide_rows
from interlace.gemm.splits import rank_in

_library = torch.library.Library("interlace", "FRAGMENT")
_TENSORS = 5  # x, w, bias, x_scale, w_scale
_EXCHANGED = "exchanged"  # the overload of calls whose lists ranks exchange each time


def define(name: str) -> GemmOperator:
    """Define ``torch.ops.interlace.<name>`` from the operator's declaration, and return it.

    Its arguments are ``x, w, bias, x_scale, w_scale``, the operator's lists of rows, ``out_dtype``,
    ``gather`` if the operator returns the gathered x, ``group_name``, ``impl``, ``config``.

    An operator that exchanges lists in every call has an overload ``exchanged`` for such calls, as
    a CUDA graph can hold none of them.

    Raises:
        ArgumentError: The operator declares no implementation ``"unfused"``.
    """
    operator = product_operator(name)
    names = [implementation.name for implementation in operator.implementations]
    # It runs where all others refuse a call.
    if "unfused" not in names:
        raise ArgumentError(
            f"{operator.name}: implementations must include 'unfused', which refuses no call; got "
            f"{', '.join(names) or 'none'}. Declare "
            "interlace.gemm.implementations.unfused.UNFUSED."
        )
    # Numbers of rows are symbolic, so that a graph compiled for dynamic shapes serves other lists,
    # too.
    lists = "".join(f"SymInt[]? {split}, " for split in operator.split_names)
    gather = "bool gather, " if operator.returns_gathered else ""
    schema = (
        f"(Tensor x, Tensor w, Tensor? bias, Tensor? x_scale, Tensor? w_scale, {lists}"
        f"ScalarType out_dtype, {gather}str group_name, str impl, str config) -> "
        f"{'(Tensor, Tensor)' if operator.returns_gathered else 'Tensor'}"
    )

    def run(*arguments: Any) -> Any:
        tensors, splits, out_dtype, gather, group_name, impl, config = _unpack(operator, arguments)
        x, w, bias, x_scale, w_scale = tensors
        operands = Operands(x, w, bias, x_scale, w_scale, out_dtype)
        return dispatch.run(operator, operands, splits, gather, group_name, impl, config)

    def fake(*arguments: Any) -> Any:
        (x, w, *_), splits, out_dtype, gather, group_name, *_ = _unpack(operator, arguments)
        # The rank comes from the process group of that name: tracing sends nothing to the peers.
        rows = operator.result_rows(x.shape[0], splits, *rank_in(group_name))
        y = x.new_empty([rows, w.shape[0]], dtype=out_dtype)
        if not operator.returns_gathered:
            return y
        return y, x.new_empty([rows if gather else 0, x.shape[1]])

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        gradients = operator.backward(ctx, *grads)
        # Autograd expects an entry for every argument; only tensors have gradients.
        return (*gradients, *[None] * (count - len(gradients)))

    count = _TENSORS + len(operator.split_names) + operator.returns_gathered + 4
    differentiable = type(operator).backward is not GemmOperator.backward
    overloads: dict[str, tuple[torch.Tag, ...]] = {name: OPERATOR_TAGS}
    if operator.exchanges(tuple(() for _ in operator.split_names)):
        overloads[f"{name}.{_EXCHANGED}"] = UNCAPTURABLE_TAGS
    for overload, tags in overloads.items():
        _library.define(overload + schema, tags=tags)
        register(
            _library,
            overload,
            run,
            fake,
            backward=backward if differentiable else None,
            setup_context=operator.set_up_backward if differentiable else None,
        )
    return operator


_MOST_VALID = 4096
_valid: dict[tuple[Hashable, ...], tuple[torch.dtype, Entrance]] = {}
"""The results' dtype and the operator of calls whose arguments were validated, by their kind: a
program makes few kinds of calls, again and again.
"""


def _kind(
    operator: GemmOperator,
    tensors: tuple[Any, ...],
    splits: Sequence[object],
    out_dtype: torch.dtype | None,
    impl: str,
    config: GemmConfig | None,
) -> tuple[Hashable, ...] | None:
    """Return everything that a validation of these arguments looks at; None for calls that are
    validated each time: of float8, of lists of rows, of a configuration, of what is no ordinary
    tensor, and of what a compiler traces.

    Args:
        tensors: X, w, bias and both scales, whatever the caller has given for them.
    """
    x, w, bias, x_scale, w_scale = tensors
    is_simple = x_scale is None and w_scale is None and config is None and isinstance(impl, str)
    is_known = out_dtype is None or isinstance(out_dtype, torch.dtype)
    has_lists = any(rows is not None for rows in splits)
    if not is_simple or not is_known or has_lists or not is_unobserved():
        return None
    for tensor in (x, w) if bias is None else (x, w, bias):
        if not (is_ordinary(tensor) and tensor.layout is torch.strided) or tensor.is_nested:
            return None
    extra = None if bias is None else (bias.shape, bias.dtype, bias.device)
    return (
        operator.name, x.shape, x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device, extra,
        out_dtype, impl,
    )  # fmt: skip


def _recalled(
    operator: GemmOperator,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    group: dist.ProcessGroup | None,
    impl: str,
    gather: bool,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
) -> tuple[Any] | None:
    """Return the result of a call that has come before, with these operands or with others that
    differ in their addresses alone, as a tuple of one; None if it must take the long way: it is
    new, or :func:`recalling_group` says so.
    """
    known_to = recalling_group(group, x, w, bias, x_scale, w_scale)
    if known_to is None or type(impl) is not str or w is None:
        return None
    # One scale alone is refused, and no form says that there is one.
    if (x_scale is None) is not (w_scale is None):
        return None
    if out_dtype is None:
        out_dtype = output_dtype(x, None)
    elif type(out_dtype) is not torch.dtype:
        return None
    # What is not contiguous is copied in each call, except for scales of blocks of x.
    is_vector = x_scale is not None and not has_wide_rows(x_scale)
    for vector in (bias, w_scale, x_scale if is_vector else None):
        if vector is not None and not vector.is_contiguous():
            return None
    known = dispatch.known_call(
        operator, x, w, bias, out_dtype, gather, impl, known_to, x_scale, w_scale
    )
    with past_autograd():
        result = dispatch.recall(known_to, known, x, w, bias, x_scale, w_scale)
    return None if result is None else (result,)


def _unpack(operator: GemmOperator, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return tensors, lists of rows, out_dtype, gather, group_name, impl and config."""
    lists = len(operator.split_names)
    tensors, splits = arguments[:_TENSORS], arguments[_TENSORS : _TENSORS + lists]
    out_dtype, *gather, group_name, impl, config = arguments[_TENSORS + lists :]
    return tensors, splits, out_dtype, bool(gather and gather[0]), group_name, impl, config


def _run_into(
    out: torch.Tensor,
    operator: GemmOperator,
    tensors: tuple[Any, ...],
    lists: tuple[Any, ...],
    dtype: torch.dtype,
    group_name: str,
    impl: str,
    config: str,
) -> torch.Tensor:
    """Write the result of a call whose arguments are valid into memory of the caller.

    Raises:
        ArgumentError: ``out`` cannot be the result, or a gradient is to be recorded.
    """
    x, w, bias, x_scale, w_scale = tensors
    shape = [operator.result_rows(x.shape[0], lists, *rank_in(group_name)), w.shape[0]]
    _require_out(operator, out, shape, dtype, x.device)
    given = [tensor for tensor in (x, w, bias, out) if tensor is not None]
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*given):
        raise ArgumentError(
            f"{operator.name}: out must be left out where a gradient is recorded; got one beside "
            "an operand that requires a gradient. Leave it out, or call under torch.no_grad()."
        )
    operands = Operands(x, w, bias, x_scale, w_scale, dtype)
    with past_autograd():
        y: torch.Tensor = dispatch.run(
            operator, operands, lists, False, group_name, impl, config, out=out
        )
    return y


def _require_out(
    operator: GemmOperator,
    out: torch.Tensor,
    shape: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse memory that is not laid out as the result.

    Raises:
        ArgumentError: It has another shape, dtype or device, or is not contiguous.
    """
    if list(out.shape) != shape or not out.is_contiguous():
        raise ArgumentError(
            f"{operator.name}: out must be contiguous and {shape}, as the result on this rank; got "
            f"shape {list(out.shape)} and strides {list(out.stride())}."
        )
    require_kind(f"{operator.name}: out", out, dtype, device, "the result")


def call(
    operator: GemmOperator,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    splits: Sequence[object],
    out_dtype: torch.dtype | None,
    group: dist.ProcessGroup | None,
    impl: str,
    config: GemmConfig | None,
    *,
    gather: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Validate the arguments of a public function and call its ``torch.ops.interlace``.

    The arguments come in the order of the schema; see :func:`define`.

    Args:
        splits: The operator's lists of rows, in the order of its declaration.
        gather: Whether the gathered x is a result, of operators that return it.
        out: The memory of the result, of operators with one result that take that.

    Raises:
        ArgumentError: No rank could compute this, or ``out`` cannot be the result.
    """
    if out is None and config is None and all(rows is None for rows in splits):
        plain = x, w, bias, x_scale, w_scale, out_dtype, group, impl, gather
        return _player(operator)(*plain) if may_be_played(x) else _plain(operator, *plain)
    return _in_full(
        operator, (x, w, bias, x_scale, w_scale), splits, out_dtype, group, impl, config, gather,
        out,
    )  # fmt: skip


@functools.cache
def _player(operator: GemmOperator) -> Callable[..., Any]:
    """Return :func:`_plain` of an operator by its tapes."""
    return tapes.player(functools.partial(_plain, operator), is_public=True)


def _plain(
    operator: GemmOperator,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    group: dist.ProcessGroup | None,
    impl: str,
    gather: bool,
) -> Any:
    """Make a call without lists of rows, configuration and memory for the result."""
    result = _recalled(operator, x, w, bias, out_dtype, group, impl, gather, x_scale, w_scale)
    if result:
        return result[0]
    tensors, splits = (x, w, bias, x_scale, w_scale), [None] * len(operator.split_names)
    return _in_full(operator, tensors, splits, out_dtype, group, impl, None, gather, None)


def _in_full(
    operator: GemmOperator,
    tensors: tuple[Any, ...],
    splits: Sequence[object],
    out_dtype: torch.dtype | None,
    group: dist.ProcessGroup | None,
    impl: str,
    config: GemmConfig | None,
    gather: bool,
    out: torch.Tensor | None,
) -> Any:
    """Validate arguments as :func:`call` has them, and call the operator."""
    x, w, bias, x_scale, w_scale = tensors
    if out is not None:
        require_tensor(f"{operator.name}: out", out)
    kind = _kind(operator, tensors, splits, out_dtype, impl, config)
    known = None if kind is None else _valid.get(kind)
    lists: Sequence[Any] = splits
    if known is None:
        validate(
            operator, x, w, bias, x_scale, w_scale, out_dtype, impl, config,
            takes_float8=operator.takes_float8,
        )  # fmt: skip
        lists = operator.validated_splits(splits)
        overload = f".{_EXCHANGED}" if operator.exchanges(tuple(lists)) else ""
        known = output_dtype(x, out_dtype), entrance(operator.name + overload)
        if kind is not None:
            if len(_valid) >= _MOST_VALID:
                _valid.clear()
            _valid[kind] = known
    (dtype, door), group_name = known, default_name(group)
    # A schema has no type for configurations, so graphs hold their text.
    text = "" if config is None else str(config)
    if out is not None and is_unobserved():
        return _run_into(out, operator, tensors, tuple(lists), dtype, group_name, impl, text)
    # What has a kind nobody listens to, and has ordinary tensors.
    y = (door if kind is None else door.past_dispatcher)(
        *tensors,
        *lists,
        dtype,
        *([gather] if operator.returns_gathered else []),
        group_name,
        impl,
        text,
    )
    if out is None:
        return y
    # What listens sees an operator without side effects, and a copy.
    _require_out(operator, out, list(y.shape), y.dtype, y.device)
    return out.copy_(y)
