"""``impl="nccl"``: the layer in stock PyTorch that never waits for the host, as servers run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from interlace.comm import process_group_named
from interlace.gemm.reference import gather_rows, sum_rows
from interlace.operators.mixture_of_experts import grouped, layout
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.choice import ExpertTerms, unmet

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import LayerCall, Saved


def refusal(terms: ExpertTerms) -> str | None:
    """Return what a call must have for ``impl="nccl"`` and has not, or None."""
    return unmet((*grouped.rules(terms), *terms.inference_rules))


def run(call: LayerCall) -> tuple[torch.Tensor, Saved]:
    """All-gather tokens and routing, multiply the rows of this rank's experts, reduce-scatter.

    The sum over a token's experts is in the dtype of x, unlike that of the other implementations.
    """
    group = process_group_named(call.group_name)
    splits = [call.sizes.tokens] * call.sizes.world_size
    x = gather_rows(call.x, splits, group)
    routing = gather_rows(grouped.routing_of(call), splits, group)
    y = sum_rows(_sums_of_experts(call, x, routing), splits, group)
    return y.contiguous(), call.unused()


def _sums_of_experts(call: LayerCall, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """Return the parts of tokens' sums that are of this rank's experts, ``[M, hidden]``.

    Args:
        x: Tokens of any ranks, ``[M, hidden]``.
        routing: Their experts and weights, as :func:`grouped.routing_of` returns them.
    """
    sizes, top_k, local = call.sizes, call.sizes.top_k, call.sizes.local
    rows = grouped.by_expert(call, routing)
    w_in, in_order = grouped.first_weight(call)
    both = torch._grouped_mm(x[rows.order // top_k], w_in, offs=rows.ends)
    # Rows of other ranks' experts take any expert's bias.
    owner = rows.experts.clamp(max=local - 1)
    if call.b_in is not None:
        both = both + layout.bias_in_order(call.b_in, in_order).view(local, -1)[owner]
    if in_order.halves:
        gates = both.view(-1, sizes.gates, sizes.ffn).unbind(1)
    else:
        gates = both.view(-1, sizes.ffn, sizes.gates).unbind(2)
    active = ExpertActivation.parse(call.activation)(*gates)
    results = torch._grouped_mm(active, grouped.second_weight(call), offs=rows.ends)
    if call.b_out is not None:
        results = results + call.b_out[owner]
    # The product leaves rows behind the last expert's undefined, perhaps NaN.
    results = torch.where((rows.experts < local)[:, None], results, 0)
    slots = results[rows.places].view(len(x), top_k, -1)
    return torch.bmm(routing[:, None, top_k:].to(x.dtype), slots)[:, 0]
