"""Linear layers of one input in one kernel; see README.md.

It has no collective, so it is not among the operators of the registry: the pass for
``torch.compile`` puts it in the place of products with the same input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm.groups.registration import OPERATOR_TAGS, register
from interlace.errors import ArgumentError
from interlace.gemm import few_rows, invariance
from interlace.gemm.few_rows import MOST_WEIGHTS, FewRowsConfig
from interlace.gemm.operands import require_bias, require_float, require_kind
from interlace.operators.linears import reference

OPERATOR = "linears"

MOST_TOKENS = 64
"""Tokens (rows of x) that the kernel takes: with more, a product is no longer bound by reading its
weight alone.
"""

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    f"{OPERATOR}(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]", tags=OPERATOR_TAGS
)


def _run(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Compute ``x @ w.T + bias`` for each weight, by the kernel where it can."""
    _validate(x, weights, biases)
    # Where calls must be batch-invariant, this kernel has all numbers of tokens.
    is_invariant = invariance.is_enabled()
    # A compiled graph may be called with more tokens than it was traced with.
    if is_invariant or x.shape[0] <= MOST_TOKENS:
        return multiply(x, weights, biases, is_batch_invariant=is_invariant)
    return reference.linears(x, weights, biases)


def multiply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    config: FewRowsConfig | None = None,
    *,
    is_batch_invariant: bool = False,
) -> list[torch.Tensor]:
    """Compute ``x [B, K] @ w.T, + bias`` for each weight ``[N, K]``, in one kernel.

    Args:
        x: The tokens.
        weights: One to three; what is not contiguous along K is copied.
        biases: A vector ``[N]`` for each weight, or None for all; copied unless contiguous.
        config: The tiles; default: those for these sizes.
        is_batch_invariant: Whether one token must be multiplied as several are.

    Returns:
        A tensor ``[B, N]`` for each weight.
    """
    if not x.numel() or not any(map(len, weights)):
        return reference.linears(x, weights, biases)
    x, *weights = (
        tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (x, *weights)
    )
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    results = [x.new_empty([len(x), len(w)]) for w in weights]
    few_rows.multiply(x, weights, biases, results, config, is_batch_invariant=is_batch_invariant)
    return results


def _fake(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    return [x.new_empty([x.shape[0], w.shape[0]]) for w in weights]


def _validate(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> None:
    """Refuse what the kernel cannot compute.

    Raises:
        ArgumentError: An argument breaks a rule, which the message says.
    """
    if not 1 <= len(weights) <= MOST_WEIGHTS or len(biases) != len(weights):
        raise ArgumentError(
            f"{OPERATOR}: weights must be 1 to {MOST_WEIGHTS}, each with a bias or None; got "
            f"{len(weights)} weights and {len(biases)} biases. Call it several times."
        )
    if x.dim() != 2:
        raise ArgumentError(f"{OPERATOR}: x must be [B, K]; got shape {list(x.shape)}.")
    require_float(f"{OPERATOR}: x", x.dtype)
    for w, bias in zip(weights, biases, strict=True):
        if w.dim() != 2 or w.shape[1] != x.shape[1]:
            raise ArgumentError(
                f"{OPERATOR}: weights must be [N, K] with K = {x.shape[1]}; got {list(w.shape)}."
            )
        require_kind(f"{OPERATOR}: weights", w, x.dtype, x.device, "x")
        if bias is not None:
            require_bias(f"{OPERATOR}: biases", bias, w, x.dtype, "x")
    if len({bias is None for bias in biases}) > 1:
        raise ArgumentError(
            f"{OPERATOR}: biases must be given for all weights or for none. Call it twice."
        )


register(_library, OPERATOR, _run, _fake)
