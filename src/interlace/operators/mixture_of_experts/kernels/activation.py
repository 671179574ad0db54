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
