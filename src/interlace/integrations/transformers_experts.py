"""Read from modules of experts in ``transformers`` what they compute and how they are laid out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from interlace.errors import ArgumentError
from interlace.operators.mixture_of_experts.activation import KINDS, ExpertActivation

_QUICK_GELU = 1.702

_NUMBERS = ("alpha", "swiglu_alpha", "limit", "swiglu_limit")
"""The attributes of experts that hold numbers of their activation."""


class WeightLayout(NamedTuple):
    """The layout in which a module keeps the weights of :func:`interlace.mixture_of_experts`.

    Attributes:
        activation: What lies between the two products.
        gates: 2 if experts have gate and up, 1 if they have no gate.
        halves: Whether the gate's rows lie before those of up, or else a row of each in turn.
        along_k: Whether weights lie as in ``nn.Linear``, or else with both dimensions exchanged.
        has_bias: Whether both products have a bias.
    """

    activation: ExpertActivation
    gates: int
    halves: bool
    along_k: bool
    has_bias: bool

    @classmethod
    def of(cls, experts: Any, name: str) -> WeightLayout:
        """Return the layout of a module of experts.

        Args:
            name: The implementation that was asked for, for errors.

        Raises:
            ArgumentError: The operator does not compute what these experts do.
        """

        def refuse(rule: str, value: object) -> ArgumentError:
            return ArgumentError(
                f"{type(experts).__name__} by ep_implementation={name!r} must {rule}; got {value}. "
                'Use ep_implementation="auto".'
            )

        # What transformers' decorator of experts has set; without it, nothing is known of them.
        flags = ("has_gate", "is_concatenated", "is_transposed", "has_bias")
        has_gate, is_concatenated, is_transposed, has_bias = (
            getattr(experts, flag, None) for flag in flags
        )
        if None in (has_gate, is_concatenated, is_transposed, has_bias):
            raise refuse("be of transformers' form (use_experts_implementation)", "another one")
        if getattr(experts, "has_post_expert_norm", False):
            raise refuse("not normalise an expert's output", "has_post_expert_norm=True")
        activation = _activation(experts, bool(has_gate), bool(is_concatenated))
        if activation is None:
            function = "_apply_gate" if has_gate else "act_fn"
            raise refuse(
                "have SiLU, GELU or ReLU as their activation, of a gate that multiplies up",
                f"{function} of another one, {getattr(experts, 'act_fn', 'without act_fn')}",
            )
        layout = cls(
            activation,
            2 if has_gate else 1,
            bool(has_gate and is_concatenated),
            not is_transposed,
            bool(has_bias),
        )
        for parameter, dimensions in layout._names():
            found = getattr(experts, parameter, None)
            if not isinstance(found, torch.Tensor) or found.dim() != dimensions:
                raise refuse(f"have {parameter} of {dimensions} dimensions", found)
        return layout

    def _names(self) -> list[tuple[str, int]]:
        """Return the names of weights, then of biases, and their numbers of dimensions."""
        weights = ["gate_up_proj" if self.gates == 2 else "up_proj", "down_proj"]
        names = [(weight, 3) for weight in weights]
        return names + [(f"{weight}_bias", 2) for weight in weights if self.has_bias]

    def parameters(self, experts: Any) -> tuple[torch.Tensor, ...]:
        """Return ``w_in``, ``w_out`` and, if there are any, both biases, as views."""
        first, second, *biases = (getattr(experts, name) for name, _ in self._names())
        if not self.along_k:
            first, second = first.transpose(1, 2), second.transpose(1, 2)
        if biases:
            biases[0] = self._lines(biases[0])
        return self._lines(first), second, *biases

    def _lines(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return ``[L, 2 F, ...]`` as ``[L, F, 2, ...]``."""
        width = parameter.shape[1] // self.gates
        sizes = (self.gates, width) if self.halves else (width, self.gates)
        lines: torch.Tensor = parameter.unflatten(1, sizes)
        return lines.transpose(1, 2) if self.halves else lines


def _activation(experts: Any, has_gate: bool, is_concatenated: bool) -> ExpertActivation | None:
    """Return the activation that agrees with a module's own function, or None.

    The function is tried rather than known by its name: models define it in code of their own, and
    a model of tomorrow may do so differently.
    """
    numbers = [
        float(value)
        for value in (getattr(experts, name, None) for name in _NUMBERS)
        if isinstance(value, (int, float)) and 0 < value < math.inf
    ]
    # Where activations bend, and on both sides of every limit that there may be.
    points = [0.3 * i for i in range(-20, 21)]
    points += [factor * number for number in numbers for factor in (-1.5, -0.7, 0.7, 1.5)]
    line = torch.tensor(points, dtype=torch.float64, device="cpu")
    gate, up = (each.flatten() for each in torch.meshgrid(line, line, indexing="ij"))
    with torch.no_grad():
        if has_gate:
            both = (
                torch.cat([gate, up]) if is_concatenated else torch.stack([gate, up], 1).flatten()
            )
            expected = experts._apply_gate(both[None])[0]
        else:
            expected = experts.act_fn(gate)
        for activation in _candidates(numbers, has_gate):
            found = activation(gate, up) if has_gate else activation(gate)
            # Some models compute the activation in float32.
            if torch.allclose(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5):
                return activation
    return None


def _candidates(numbers: list[float], has_gate: bool) -> Iterator[ExpertActivation]:
    """Return the activations that experts with these numbers may have, the plain ones first."""
    limits = [None, *numbers] if has_gate else [None]
    for up_offset, limit in itertools.product((0.0, 1.0) if has_gate else (0.0,), limits):
        for kind in KINDS:
            alphas = (1.0, _QUICK_GELU, *numbers) if kind == "silu" else (1.0,)
            for alpha in alphas:
                yield ExpertActivation(kind, alpha, limit, up_offset)
