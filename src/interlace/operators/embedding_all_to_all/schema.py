"""``torch.ops.interlace.embedding_all_to_all``: schema, shape inference, gradient. Triton is
imported by the first call.

The operator and its two backward halves have the arguments of ``call.SharedArguments`` in common.
``anchor`` makes the output require a gradient on ranks whose tables do not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from interlace.comm import group_named
from interlace.comm.groups.registration import (
    UNCAPTURABLE_TAGS,
    entrance,
    is_ordinary,
    is_unobserved,
    once_differentiable,
    past_autograd,
    register,
)
from interlace.gemm.operands import require_values
from interlace.operators.embedding_all_to_all.backward import (
    BACKWARD,
    distinct_rows,
    gradients_target,
    update_target,
)
from interlace.operators.embedding_all_to_all.call import KnownCall, SharedArguments, agreed_call
from interlace.operators.embedding_all_to_all.config import OPERATOR
from interlace.operators.embedding_all_to_all.layout import dense_bounds
from interlace.operators.embedding_all_to_all.operator import EmbeddingAllToAll

_library = torch.library.Library("interlace", "FRAGMENT")
_LAYOUT = "SymInt batch, int[] counts, int[] widths, int rank, str pooling, ScalarType dtype"
_OPTIONS = "str group_name, str impl, str config"
# Ranks ask one another in every call whether any table is trained, until one says yes, and sparse
# gradients wait for the device; so no CUDA graph can hold the operators.
_library.define(
    "embedding_all_to_all(Tensor[] weights, Tensor indices, Tensor offsets, Tensor? "
    "per_sample_weights, Tensor? anchor, "
    f"Tensor[] states, {_LAYOUT}, str gradient, float learning_rate, float epsilon, {_OPTIONS}, "
    "bool check) -> Tensor",
    tags=UNCAPTURABLE_TAGS,
)
_library.define(
    "embedding_all_to_all_gradient(Tensor grad, Tensor indices, Tensor offsets, Tensor? "
    "per_sample_weights, "
    f"{_LAYOUT}, int[] rows, bool[] trainable, ScalarType table_dtype, bool sparse, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    tags=UNCAPTURABLE_TAGS,
)
_library.define(
    "embedding_all_to_all_update(Tensor grad, Tensor(a!)[] weights, Tensor(b!)[] states, Tensor "
    "indices, Tensor offsets, "
    f"Tensor? per_sample_weights, {_LAYOUT}, bool[] trainable, str kind, float learning_rate, "
    f"float epsilon, {_OPTIONS}) -> Tensor",
    tags=UNCAPTURABLE_TAGS,
)


_SHARED = len(SharedArguments._fields)
_OPTIONS_END = _SHARED + 7
"""The place behind the shared arguments and those that follow them. What a call is known by stands
there, of calls that go past PyTorch's dispatcher.
"""
DECLARATION = EmbeddingAllToAll()


def _run(
    weights: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    anchor: torch.Tensor | None,
    states: list[torch.Tensor],
    *others: Any,
) -> torch.Tensor:
    known = others[_OPTIONS_END] if len(others) > _OPTIONS_END else None
    group_name, impl, config, check = others[_OPTIONS_END - 4 : _OPTIONS_END]
    if known is not None:
        y: torch.Tensor | None = group_named(group_name, indices.device).recall(known)
        if y is not None:
            return y
    call = agreed_call(
        OPERATOR,
        weights,
        (indices, offsets, scale),
        SharedArguments(*others[:_SHARED]),
        (group_name, impl, config),
        check,
        known,
    )
    return DECLARATION.run(call)


def _fake(weights: list[torch.Tensor], indices: torch.Tensor, *others: Any) -> torch.Tensor:
    _offsets, _scale, _anchor, _states, *others_from_batch = others
    exchange = SharedArguments(*others_from_batch[:_SHARED])
    layout = exchange.layout
    return indices.new_empty([layout.samples(exchange.rank), layout.columns], dtype=exchange.dtype)


def _run_gradient(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    exchange = SharedArguments(*others[:_SHARED])
    rows, trainable, table_dtype, sparse, *options = others[_SHARED:]
    call = agreed_call(BACKWARD, [], (indices, offsets, scale), exchange, options)
    target = gradients_target(call, rows, trainable, table_dtype, sparse)
    lookups = DECLARATION.run_backward(call, grad, target)
    assert target.values is not None
    if sparse and lookups is not None:
        keys, bounds = distinct_rows(call, lookups, rows)
    else:
        keys, bounds = (indices.new_empty(0, dtype=torch.int64) for _ in range(2))
    return target.values, keys, bounds, _for_anchor(grad, trainable)


def _fake_gradient(
    grad: torch.Tensor, indices: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _offsets, _scale, *others_from_batch = others
    own_widths = SharedArguments(*others_from_batch[:_SHARED]).own_widths
    rows, trainable, table_dtype, sparse, *_ = others_from_batch[_SHARED:]
    lookups = indices.shape[0]
    # Dense gradients have no keys.
    values, keys, bounds = (
        ((lookups, max(own_widths, default=1)), lookups, len(rows) + 1)
        if sparse
        else ((dense_bounds(rows, own_widths)[-1],), 0, 0)
    )
    return (
        grad.new_empty(values, dtype=table_dtype),
        grad.new_empty(keys, dtype=torch.int64),
        grad.new_empty(bounds, dtype=torch.int64),
        _for_anchor(grad, trainable),
    )


def _for_anchor(grad: torch.Tensor, trainable: Sequence[bool]) -> torch.Tensor:
    """Return the anchor's gradient: zero, or no elements on a rank that trains tables.

    On a rank that trains no table, nothing else depends on the backward half. Without it a compiler
    would leave the call out, and peers would wait for this rank's gradients.
    """
    return grad.new_zeros((0,) if any(trainable) else (), dtype=torch.float32)


def _run_update(
    grad: torch.Tensor,
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    *others: Any,
) -> torch.Tensor:
    trainable, kind, learning_rate, epsilon, group_name, impl, config, *more = others[_SHARED:]
    known = more[0] if more else None
    if known is not None and group_named(group_name, indices.device).recall(known) is not None:
        return _for_anchor(grad, trainable)
    exchange, options = SharedArguments(*others[:_SHARED]), (group_name, impl, config)
    call = agreed_call(BACKWARD, weights, (indices, offsets, scale), exchange, options, known=known)
    target = update_target(call, states, trainable, kind, learning_rate, epsilon)
    DECLARATION.run_backward(call, grad, target)
    return _for_anchor(grad, trainable)


def _fake_update(grad: torch.Tensor, *others: Any) -> torch.Tensor:
    _weights, _states, _indices, _offsets, _scale, *others_from_batch = others
    return _for_anchor(grad, others_from_batch[_SHARED])


# Autograd

_ANCHOR = 4


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weights, indices, offsets, scale, _, states, *options = inputs
    ctx.exchange, ctx.tables = SharedArguments(*options[:_SHARED]), len(weights)
    behind = options[_SHARED:_OPTIONS_END]
    ctx.gradient, ctx.learning_rate, ctx.epsilon, *ctx.options, _ = behind
    ctx.known, ctx.inputs = (*options[_OPTIONS_END:], None)[0], len(inputs)
    ctx.trainable = [weight.requires_grad for weight in weights]
    ctx.table_dtype = weights[0].dtype if weights else ctx.exchange.dtype
    ctx.updates = ctx.gradient not in ("dense", "sparse")
    # A fused update writes to the tables in the backward pass, so it needs the tensors themselves,
    # wherever they lie by then; dense and sparse gradients need only their sizes. The graph does
    # not save them: no gradient depends on their values, and to save and find each of them takes
    # the host longer than the rest of the call.
    if ctx.updates:
        ctx.written = [*weights, *states]
    else:
        ctx.rows = [weight.shape[0] for weight in weights]
    ctx.save_for_backward(indices, offsets, scale)


@once_differentiable("embedding_all_to_all")
def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    indices, offsets, scale = ctx.saved_tensors
    # Autograd expects an entry per input, and a list for each list of tensors.
    nothing: list[Any] = [None] * ctx.inputs
    nothing[0] = [None] * ctx.tables
    nothing[5] = [None] * (len(ctx.written) - ctx.tables if ctx.updates else 0)
    if ctx.updates:
        arguments = (
            grad,
            ctx.written[: ctx.tables],
            ctx.written[ctx.tables :],
            indices,
            offsets,
            scale,
            *ctx.exchange,
            ctx.trainable,
            ctx.gradient,
            ctx.learning_rate,
            ctx.epsilon,
            *ctx.options,
        )
        enter, known = entrance("embedding_all_to_all_update"), _known_update(ctx, grad)
        for_anchor = (
            enter(*arguments) if known is None else enter.past_dispatcher(*arguments, known)
        )
        nothing[_ANCHOR] = None if any(ctx.trainable) else for_anchor
        return tuple(nothing)
    sparse = ctx.gradient == "sparse"
    values, keys, bounds, for_anchor = entrance("embedding_all_to_all_gradient")(
        grad,
        indices,
        offsets,
        scale,
        *ctx.exchange,
        ctx.rows,
        ctx.trainable,
        ctx.table_dtype,
        sparse,
        *ctx.options,
    )
    own_widths = ctx.exchange.own_widths
    tables = (
        _sparse(values, keys, bounds, ctx.rows, own_widths)
        if sparse
        else _dense(values, ctx.rows, own_widths)
    )
    nothing[0] = [
        table if trains else None for table, trains in zip(tables, ctx.trainable, strict=True)
    ]
    nothing[_ANCHOR] = None if any(ctx.trainable) else for_anchor
    return tuple(nothing)


class _Updating(torch.autograd.Function):
    """A call whose backward pass updates the tables itself, so that no gradient leaves it.

    Tables are no inputs of autograd's graph, then, which takes the host microseconds for each; the
    anchor, which there is where any rank trains its tables, makes the output require a gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
        # By the dispatcher's way, too, an implementation runs below autograd and autocast.
        with past_autograd():
            y = _run(*arguments)
        _setup_context(ctx, arguments, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return _backward(ctx, *grads)[_ANCHOR], None


def _record(record_any: Callable[..., Any]) -> Callable[..., Any]:
    """Return what records a call, given what records one whose tables get gradients."""

    def record(*arguments: Any) -> Any:
        anchor, gradient = arguments[_ANCHOR], arguments[_ANCHOR + 2 + _SHARED]
        if anchor is None or gradient in ("dense", "sparse"):
            return record_any(*arguments)
        return _Updating.apply(anchor, arguments)  # type: ignore[no-untyped-call]

    return record


def _known_update(ctx: Any, grad: torch.Tensor) -> tuple[Hashable, ...] | None:
    """Return what tells the update of a known call from every other one; None if it must be looked
    at as a whole: something listens now, or a table or a state lies elsewhere, or is another one,
    than in the forward pass.
    """
    known: KnownCall | None = ctx.known
    if known is None or not (is_unobserved() and is_ordinary(grad) and grad.is_contiguous()):
        return None
    if not known.seen.are(ctx.written):
        return None
    return BACKWARD, known, grad.data_ptr(), grad.shape, grad.dtype


def _dense(values: torch.Tensor, rows: Sequence[int], widths: Sequence[int]) -> list[torch.Tensor]:
    starts = dense_bounds(rows, widths)[:-1]
    return [
        values[start : start + count * width].view(count, width)
        for start, count, width in zip(starts, rows, widths, strict=True)
    ]


def _sparse(
    values: torch.Tensor,
    keys: torch.Tensor,
    bounds: torch.Tensor,
    rows: Sequence[int],
    widths: Sequence[int],
) -> list[torch.Tensor]:
    # Sizes of COO tensors live on the host, so this waits for the device.
    require_values(f'{OPERATOR}: gradients by gradient="sparse"', bounds)
    ends: list[int] = bounds.tolist()
    gradients, first = [], 0
    for table, (count, width) in enumerate(zip(rows, widths, strict=True)):
        part = slice(ends[table], ends[table + 1])
        numbers, sums = (keys[part] - first)[None], values[part, :width]
        if len(sums) == 1:
            # PyTorch takes a single row for contiguous, whatever its stride, and adds as many
            # elements as that says: beyond the table's row, and beyond the table.
            sums = sums.view(width).view(1, width)
        gradients.append(
            torch.sparse_coo_tensor(
                numbers, sums, (count, width), is_coalesced=True, check_invariants=False
            )
        )
        first += count
    return gradients


register(
    _library,
    "embedding_all_to_all",
    _run,
    _fake,
    backward=_backward,
    setup_context=_setup_context,
    record=_record,
)
register(_library, "embedding_all_to_all_gradient", _run_gradient, _fake_gradient)
register(_library, "embedding_all_to_all_update", _run_update, _fake_update)
