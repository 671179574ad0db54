"""``mixture_of_experts`` as dense products in float32, which its results are checked against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.layout import Parameters


def mixture_of_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    parameters: Parameters,
    activation: ExpertActivation,
    first: int = 0,
) -> torch.Tensor:
    """Return each token's weighted sum over some experts, float32 ``[T, hidden]``.

    Args:
        x: Tokens, ``[T, hidden]``.
        experts: Their experts, ``[T, k]``.
        weights: The weights of those, ``[T, k]``.
        parameters: Those of the experts that are summed over.
        activation: The function between the two products.
        first: The number of the first of these experts.
    """
    x = x.float()
    sums = torch.zeros_like(x)
    for number in range(len(parameters.w_in)):
        names = experts == first + number
        tokens = names.any(1).nonzero()[:, 0]
        if len(tokens):
            w_in, w_out = parameters.w_in[number].float(), parameters.w_out[number].float()
            b_in, b_out = (None if b is None else b[number].float() for b in parameters[2:])
            gates = [
                F.linear(x[tokens], w_in[:, i], None if b_in is None else b_in[:, i])
                for i in range(w_in.shape[1])
            ]
            result = F.linear(activation(*gates), w_out, b_out)
            sums[tokens] += (weights * names).sum(1)[tokens, None] * result
    return sums
