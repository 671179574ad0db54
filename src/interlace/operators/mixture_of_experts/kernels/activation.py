"""The activation between an expert's two products, and its derivative."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Form(NamedTuple):
    """The constants that describe the activation; see ``ExpertActivation``.

    Attributes:
        gates: 2 if gate and up are multiplied, 1 if experts have no gate.
        halves: Whether an expert's gate lies before its up in memory, or else a line of each in
            turn; so do their gradients. False without a gate.
        kind, alpha, limit, up_offset: Those of ``ExpertActivation``.
    """

    gates: Any
    halves: Any
    kind: Any
    alpha: Any
    limit: Any
    up_offset: Any


@triton.jit
def clamp_gate(gate, FORM: tl.constexpr):
    """Return the gate as the activation takes it: clamped, if there is a limit."""
    if FORM.limit is not None:
        # A comparison keeps NaN, which marks rows that did not arrive; tl.minimum would drop it.
        gate = tl.where(gate > FORM.limit, FORM.limit, gate)
    return gate


@triton.jit
def clamp_up(up, FORM: tl.constexpr):
    """Return up as the gate multiplies it: clamped, if there is a limit, and with its offset."""
    if FORM.limit is not None:
        up = tl.where(up > FORM.limit, FORM.limit, up)
        up = tl.where(up < -FORM.limit, -FORM.limit, up)
    if FORM.up_offset != 0:
        up += FORM.up_offset
    return up


@triton.jit
def activate(gate, up, FORM: tl.constexpr):
    """Return the activation of gate and up, of which ``up`` is None without a gate."""
    gate = clamp_gate(gate, FORM)
    if FORM.kind == "silu":
        active = gate / (1 + tl.exp(-gate if FORM.alpha == 1 else -FORM.alpha * gate))
    else:
        active, _ = act(gate, FORM)
    return active if FORM.gates == 1 else active * clamp_up(up, FORM)


@triton.jit
def act(gate, FORM: tl.constexpr):
    """Return ``act(gate)``, and the factor that :func:`times_slope` needs.

    The factor is the one that gate is multiplied by.
    """
    if FORM.kind == "silu":
        factor = 1 / (1 + tl.exp(-gate if FORM.alpha == 1 else -FORM.alpha * gate))
    elif FORM.kind == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        factor = 1 / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif FORM.kind == "gelu":
        factor = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    else:
        factor = tl.where(gate < 0, 0.0, gate if FORM.kind == "relu2" else 1.0)
        # A comparison keeps NaN, as in clamp_gate; minus infinity times 0 would be NaN.
        gate = tl.where(gate < 0, 0.0, gate)
    return gate * factor, factor


@triton.jit
def times_slope(upstream, gate, factor, FORM: tl.constexpr):
    """Return ``upstream`` times the derivative of ``act`` at ``gate``."""
    if FORM.kind == "silu":
        if FORM.alpha == 1:
            return upstream * factor * (1 + gate * (1 - factor))
        else:
            return upstream * factor * (1 + FORM.alpha * gate * (1 - factor))
    elif FORM.kind == "gelu_tanh":
        inner = 1.5957691216057308 + 0.21406444881780076 * gate * gate
        return upstream * factor * (1 + gate * inner * (1 - factor))
    elif FORM.kind == "gelu":
        return upstream * (factor + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate))
    elif FORM.kind == "relu2":
        return upstream * 2 * factor
    else:
        # The derivative at 0 is 0, as in PyTorch.
        return upstream * tl.where(gate > 0, factor, 0.0)


class ActivatedRows(NamedTuple):
    """Gate and up of some rows, and what their gradients need of the activation.

    Attributes:
        gate, up: Gate and up before they are clamped; ``up`` has no meaning without a gate.
        clamped_gate, clamped_up: What the activation takes of them.
        value, factor: Those of :func:`act`.
    """

    gate: Any
    up: Any
    clamped_gate: Any
    clamped_up: Any
    value: Any
    factor: Any


@triton.jit
def activated_rows(gate, up, FORM: tl.constexpr):
    """Compute the activation of gate and up for :func:`store_gradients`."""
    clamped_up = clamp_up(up, FORM)
    clamped_gate = clamp_gate(gate, FORM)
    value, factor = act(clamped_gate, FORM)
    return ActivatedRows(gate, up, clamped_gate, clamped_up, value, factor)


@triton.jit
def times_up(value, rows, FORM: tl.constexpr):
    """Return ``value`` times the clamped up, or ``value`` where experts have no gate."""
    return value * rows.clamped_up if FORM.gates == 2 else value


@triton.jit
def store_gradients(
    inner, upstream, rows, row, end, start, width, FORM: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Store the gradients of gate and up of rows before ``end`` and columns from ``start`` on, in
    the order of w_in's lines.

    They are 0 where gate or up is clamped, unless ``upstream``, the gradient of the activation,
    float32 ``[ROWS, COLS]``, is NaN. ``rows`` are those of :func:`activated_rows`.
    """
    dtype = inner.dtype.element_ty
    slope = times_up(upstream, rows, FORM)
    of_gate = times_slope(slope, rows.clamped_gate, rows.factor, FORM)
    of_up = upstream * rows.value
    if FORM.limit is not None:
        is_number = upstream == upstream
        of_gate = tl.where((rows.gate > FORM.limit) & is_number, 0.0, of_gate)
        is_clamped = (rows.up > FORM.limit) | (rows.up < -FORM.limit)
        of_up = tl.where(is_clamped & is_number, 0.0, of_up)
    column = start + tl.arange(0, COLS)[None, :]
    mask = (row < end)[:, None] & (column < width)
    if FORM.gates == 1:
        offsets = row.to(tl.int64)[:, None] * width + column
        tl.store(inner + offsets, of_gate.to(dtype), mask=mask)
    elif FORM.halves:
        pointers = inner + row.to(tl.int64)[:, None] * 2 * width + column
        tl.store(pointers, of_gate.to(dtype), mask=mask)
        tl.store(pointers + width, of_up.to(dtype), mask=mask)
    else:
        both = tl.join(of_gate, of_up)
        both_columns = 2 * start + tl.arange(0, 2 * COLS)[None, :]
        both_offsets = row.to(tl.int64)[:, None] * 2 * width + both_columns
        both_mask = (row < end)[:, None] & (both_columns < 2 * width)
        pointers = inner + both_offsets
        tl.store(pointers, tl.reshape(both, [ROWS, 2 * COLS]).to(dtype), mask=both_mask)
