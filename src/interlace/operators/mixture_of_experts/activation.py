"""The activation of experts: one description, which kernels take as constants and stock PyTorch
takes as a function.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Self

import torch
import torch.nn.functional as F

from interlace.errors import ArgumentError

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclasses.dataclass(frozen=True)
class ExpertActivation:
    """The function between an expert's two products, ``act(gate) * up``.

    With numbers, it is ``act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)``. Without
    a gate, it is ``act(up)``.

    Attributes:
        kind: ``act(z)``: ``"silu"``, z sigmoid(alpha z); ``"gelu"``; ``"gelu_tanh"``, GELU as tanh
            approximates it; ``"relu"``; or ``"relu2"``, the square of ReLU.
        alpha: The factor in the sigmoid of ``"silu"``: 1.702 approximates GELU.
        limit: What gate and up are clamped to; None for no limit.
        up_offset: What is added to up.

    Raises:
        ArgumentError: A field breaks its rule.

    Example:
        >>> gpt_oss = interlace.ExpertActivation("silu", alpha=1.702, limit=7.0, up_offset=1.0)
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(
                f"ExpertActivation: kind must be one of {', '.join(KINDS)}; got {self.kind!r}."
            )
        if not 0 < self.alpha < math.inf or (self.alpha != 1 and self.kind != "silu"):
            raise ArgumentError(
                "ExpertActivation: alpha must be positive and finite, and 1 for other kinds than "
                f"'silu'; got {self.alpha} for {self.kind!r}."
            )
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ArgumentError(
                "ExpertActivation: limit must be positive and finite, or None for no limit; got "
                f"{self.limit}."
            )
        if not math.isfinite(self.up_offset):
            raise ArgumentError(
                f"ExpertActivation: up_offset must be finite; got {self.up_offset}."
            )

    def __call__(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the activation in stock PyTorch; experts without a gate have no ``up``."""
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
        if self.kind == "silu":
            active = F.silu(gate) if self.alpha == 1 else gate * torch.sigmoid(self.alpha * gate)
        elif self.kind in ("gelu", "gelu_tanh"):
            active = F.gelu(gate, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        else:
            active = F.relu(gate).square() if self.kind == "relu2" else F.relu(gate)
        if up is None:
            return active
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
        return active * (up + self.up_offset if self.up_offset else up)

    @property
    def needs_gate(self) -> bool:
        """Return whether a number of this activation has no meaning without a gate."""
        return self.limit is not None or self.up_offset != 0

    def __str__(self) -> str:
        """Return ``"name=value, ..."``, which :meth:`parse` reads: the operator carries the
        activation through compiled graphs in this form.
        """
        return (
            f"kind={self.kind}, alpha={self.alpha}, limit={self.limit}, up_offset={self.up_offset}"
        )

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Self:
        """Return the activation whose ``str`` is ``text``.

        Raises:
            ArgumentError: It is not the text of an activation, or its values are refused.
        """
        values = dict(item.split("=", 1) for item in text.split(", ") if "=" in item)
        try:
            kind = values.pop("kind")
            numbers = {
                name: None if value == "None" else float(value) for name, value in values.items()
            }
            activation = cls(kind, **numbers)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"ExpertActivation: text must be str() of an activation; got {text!r}."
            ) from error
        return activation

    @classmethod
    def of(cls, activation: str | ExpertActivation) -> ExpertActivation:
        """Return an activation, which may be given as the word of its kind.

        Raises:
            ArgumentError: It is neither, or there is no such kind.
        """
        if isinstance(activation, ExpertActivation):
            return activation
        if isinstance(activation, str):
            return cls(activation)
        raise ArgumentError(
            "mixture_of_experts: activation must be a word or an interlace.ExpertActivation; got "
            f"{type(activation).__name__}."
        )
