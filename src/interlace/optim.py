"""Updates of embedding tables that are fused into the backward pass of
:func:`interlace.embedding_all_to_all`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from interlace.errors import ArgumentError


def _require(name: str, argument: str, value: float, *, positive: bool) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        rule = "positive" if positive else "not negative"
        raise ArgumentError(f"{name}: {argument} must be {rule} and finite; got {value}.")


@dataclasses.dataclass(frozen=True, eq=False)
class SGD:
    """Stochastic gradient descent, applied by the backward pass; no gradient is stored::

        row -= learning_rate * gradient of the row

    The arithmetic is float32; the row is rounded to the table's dtype, to nearest.

    Args:
        learning_rate: At the time of the call whose backward pass it is. A captured CUDA graph
            keeps it.
    """

    learning_rate: float

    def __post_init__(self) -> None:
        _require("SGD", "learning_rate", self.learning_rate, positive=False)


@dataclasses.dataclass(frozen=True, eq=False)
class RowWiseAdagrad:
    """Adagrad with one number of state per row, applied by the backward pass.

    It is the standard for DLRM, as in FBGEMM::

        state[row] += mean over the row of gradient**2
        row -= learning_rate * gradient / (sqrt(state[row]) + epsilon)

    where ``gradient`` is the row's, summed over all its lookups. Rows that were not looked up do
    not change. The arithmetic is float32; the row is rounded to the table's dtype, to nearest.

    Args:
        learning_rate: At the time of the call whose backward pass it is. A captured CUDA graph
            keeps it.
        epsilon: Keeps the division finite.
        states: State of each of this rank's tables, float32 ``[rows]``, contiguous; updated in
            place.
    """

    learning_rate: float
    epsilon: float
    states: Sequence[torch.Tensor]

    def __post_init__(self) -> None:
        _require("RowWiseAdagrad", "learning_rate", self.learning_rate, positive=False)
        _require("RowWiseAdagrad", "epsilon", self.epsilon, positive=True)


Gradient = str | SGD | RowWiseAdagrad

__all__ = ["SGD", "RowWiseAdagrad"]
