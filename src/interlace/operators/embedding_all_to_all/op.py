"""``torch.ops.interlace.embedding_all_to_all``: schema, shape inference, gradient. Triton is
imported by the first call.

Arguments that the operator and its two backward halves share: ``batch`` samples of all ranks;
``counts``, each rank's number of tables, and ``widths``, of all of them in rank order; ``rank``,
this one; ``pooling``, the mode (torch's functionalisation has an argument of that name); ``dtype``,
of the output. ``anchor`` makes the output require a gradient on ranks whose tables do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.registration import OPERATOR_TAGS, once_differentiable, register
from interlace.operators.embedding_all_to_all.layout import Layout, dense_bounds

_library = torch.library.Library("interlace", "FRAGMENT")
_LAYOUT = "SymInt batch, int[] counts, int[] widths, int rank, str pooling, ScalarType dtype"
_HOW = "str group_name, str impl, str config"
_library.define(
    "embedding_all_to_all(Tensor[] weights, Tensor indices, Tensor offsets, Tensor? "
    "per_sample_weights, Tensor? anchor, "
    f"Tensor[] states, {_LAYOUT}, str gradient, float learning_rate, float epsilon, {_HOW}, bool "
    "check) -> Tensor",
    tags=OPERATOR_TAGS,
)
_library.define(
    "embedding_all_to_all_gradient(Tensor grad, Tensor indices, Tensor offsets, Tensor? "
    "per_sample_weights, "
    f"{_LAYOUT}, int[] rows, bool[] trainable, ScalarType table_dtype, bool sparse, {_HOW}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    tags=OPERATOR_TAGS,
)
_library.define(
    "embedding_all_to_all_update(Tensor grad, Tensor(a!)[] weights, Tensor(b!)[] states, Tensor "
    "indices, Tensor offsets, "
    f"Tensor? per_sample_weights, {_LAYOUT}, bool[] trainable, str kind, float learning_rate, "
    f"float epsilon, {_HOW}) -> Tensor",
    tags=OPERATOR_TAGS,
)


def _call(
    weights: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    layout: tuple[int, Sequence[int], Sequence[int]],
    rank: int,
    mode: str,
    dtype: torch.dtype,
    how: Sequence[str],
) -> Any:
    from interlace.operators.embedding_all_to_all.launch import Call

    batch, counts, widths = layout
    group_name, impl, config = how
    columns = Layout.of(counts, widths, batch)
    numbers = indices.contiguous(), offsets.contiguous()
    return Call(weights, *numbers, scale, columns, rank, mode, dtype, group_name, impl, config)


def _run(
    weights: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    anchor: torch.Tensor | None,
    states: list[torch.Tensor],
    batch: int,
    counts: Sequence[int],
    widths: Sequence[int],
    rank: int,
    mode: str,
    dtype: torch.dtype,
    gradient: str,
    learning_rate: float,
    epsilon: float,
    group_name: str,
    impl: str,
    config: str,
    check: bool,
) -> torch.Tensor:
    from interlace.operators.embedding_all_to_all.launch import run

    how = group_name, impl, config
    return run(
        _call(weights, indices, offsets, scale, (batch, counts, widths), rank, mode, dtype, how),
        check,
    )


def _fake(
    weights: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    anchor: torch.Tensor | None,
    states: list[torch.Tensor],
    batch: int,
    counts: Sequence[int],
    widths: Sequence[int],
    rank: int,
    mode: str,
    dtype: torch.dtype,
    *_: object,
) -> torch.Tensor:
    layout = Layout.of(counts, widths, batch)
    return indices.new_empty([layout.samples(rank), layout.columns], dtype=dtype)


def _run_gradient(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    batch: int,
    counts: Sequence[int],
    widths: Sequence[int],
    rank: int,
    mode: str,
    dtype: torch.dtype,
    rows: Sequence[int],
    trainable: Sequence[bool],
    table_dtype: torch.dtype,
    sparse: bool,
    *how: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from interlace.operators.embedding_all_to_all.backward import gradient

    call = _call([], indices, offsets, scale, (batch, counts, widths), rank, mode, dtype, how)
    return *gradient(call, grad, rows, trainable, table_dtype, sparse), _for_anchor(grad, trainable)


def _fake_gradient(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    batch: int,
    counts: Sequence[int],
    widths: Sequence[int],
    rank: int,
    mode: str,
    dtype: torch.dtype,
    rows: Sequence[int],
    trainable: Sequence[bool],
    table_dtype: torch.dtype,
    sparse: bool,
    *how: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mine = _widths_of(counts, widths, rank)
    lookups, nothing = indices.shape[0], _for_anchor(grad, trainable)
    if not sparse:
        values = grad.new_empty(dense_bounds(rows, mine)[-1], dtype=table_dtype)
        return (
            values,
            grad.new_empty(0, dtype=torch.int64),
            grad.new_empty(0, dtype=torch.int64),
            nothing,
        )
    values = grad.new_empty(lookups, max(mine, default=1), dtype=table_dtype)
    return (
        values,
        grad.new_empty(lookups, dtype=torch.int64),
        grad.new_empty(len(rows) + 1, dtype=torch.int64),
        nothing,
    )


def _for_anchor(grad: torch.Tensor, trainable: Sequence[bool]) -> torch.Tensor:
    """The anchor's gradient: zero. Of no elements on a rank that trains tables, where nobody asks
    for it.

    On a rank that trains none, it is all that depends on the backward half. Without it a compiler
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
    batch: int,
    counts: Sequence[int],
    widths: Sequence[int],
    rank: int,
    mode: str,
    dtype: torch.dtype,
    trainable: Sequence[bool],
    kind: str,
    learning_rate: float,
    epsilon: float,
    *how: str,
) -> torch.Tensor:
    from interlace.operators.embedding_all_to_all.backward import update

    call = _call(weights, indices, offsets, scale, (batch, counts, widths), rank, mode, dtype, how)
    update(call, grad, states, trainable, kind, learning_rate, epsilon)
    return _for_anchor(grad, trainable)


def _fake_update(
    grad: torch.Tensor,
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    batch: int,
    counts: Sequence[int],
    widths: Sequence[int],
    rank: int,
    mode: str,
    dtype: torch.dtype,
    trainable: Sequence[bool],
    *_: object,
) -> torch.Tensor:
    return _for_anchor(grad, trainable)


# Autograd

_INPUTS = 19  # of embedding_all_to_all
_ANCHOR = 4


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weights, indices, offsets, scale, _, states, *rest = inputs
    _, _, _, _, _, _, ctx.gradient, ctx.learning_rate, ctx.epsilon, *how, _ = rest
    ctx.layout, ctx.how, ctx.tables = tuple(rest[:6]), tuple(how), len(weights)
    ctx.trainable = [weight.requires_grad for weight in weights]
    ctx.rows = [weight.shape[0] for weight in weights]
    ctx.table_dtype = weights[0].dtype if weights else rest[5]
    ctx.updates = ctx.gradient not in ("dense", "sparse")
    ctx.scaled = scale is not None
    kept = [*weights, *states] if ctx.updates else []
    ctx.save_for_backward(indices, offsets, *([scale] if ctx.scaled else []), *kept)


@once_differentiable("embedding_all_to_all")
def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    indices, offsets, *kept = ctx.saved_tensors
    scale = kept.pop(0) if ctx.scaled else None
    nothing: list[Any] = [None] * _INPUTS
    nothing[0], nothing[5] = (
        [None] * ctx.tables,
        [None] * (len(kept) - ctx.tables if ctx.updates else 0),
    )
    if ctx.updates:
        weights, states = kept[: ctx.tables], kept[ctx.tables :]
        for_anchor = torch.ops.interlace.embedding_all_to_all_update(
            grad, weights, states, indices, offsets, scale, *ctx.layout,
            ctx.trainable, ctx.gradient, ctx.learning_rate, ctx.epsilon, *ctx.how,
        )  # fmt: skip
        nothing[_ANCHOR] = None if any(ctx.trainable) else for_anchor
        return tuple(nothing)
    sparse = ctx.gradient == "sparse"
    values, keys, bounds, for_anchor = torch.ops.interlace.embedding_all_to_all_gradient(
        grad,
        indices,
        offsets,
        scale,
        *ctx.layout,
        ctx.rows,
        ctx.trainable,
        ctx.table_dtype,
        sparse,
        *ctx.how,
    )
    _, counts, widths, rank, *_ = ctx.layout
    mine = _widths_of(counts, widths, rank)
    tables = (
        _sparse(values, keys, bounds, ctx.rows, mine) if sparse else _dense(values, ctx.rows, mine)
    )
    nothing[0] = [
        table if wanted else None for table, wanted in zip(tables, ctx.trainable, strict=True)
    ]
    nothing[_ANCHOR] = None if any(ctx.trainable) else for_anchor
    return tuple(nothing)


def _dense(values: torch.Tensor, rows: Sequence[int], widths: Sequence[int]) -> list[torch.Tensor]:
    places = dense_bounds(rows, widths)
    return [
        values[place : place + count * width].view(count, width)
        for place, count, width in zip(places[:-1], rows, widths, strict=True)
    ]


def _sparse(
    values: torch.Tensor,
    keys: torch.Tensor,
    bounds: torch.Tensor,
    rows: Sequence[int],
    widths: Sequence[int],
) -> list[torch.Tensor]:
    # Sizes of COO tensors live on the host: this waits for the device
    ends: list[int] = bounds.tolist()
    found, first = [], 0
    for table, (count, width) in enumerate(zip(rows, widths, strict=True)):
        part = slice(ends[table], ends[table + 1])
        numbers = (keys[part] - first)[None]
        size = (count, width)
        found.append(
            torch.sparse_coo_tensor(
                numbers, values[part, :width], size, is_coalesced=True, check_invariants=False
            )
        )
        first += count
    return found


def _widths_of(counts: Sequence[int], widths: Sequence[int], rank: int) -> Sequence[int]:
    first = sum(counts[:rank])
    return widths[first : first + counts[rank]]


register(
    _library, "embedding_all_to_all", _run, _fake, backward=_backward, setup_context=_setup_context
)
register(_library, "embedding_all_to_all_gradient", _run_gradient, _fake_gradient)
register(_library, "embedding_all_to_all_update", _run_update, _fake_update)
