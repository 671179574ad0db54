"""``impl="nccl"``: the layer in stock PyTorch that never waits for the host, as servers run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from interlace.comm import process_group_named
from interlace.gemm.reference import gather_rows, sum_rows
from interlace.operators.mixture_of_experts import layout
from interlace.operators.mixture_of_experts.activation import ExpertActivation

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import Call
    from interlace.operators.mixture_of_experts.choice import Terms

_ALIGNMENT_BYTES = 16
"""PyTorch's grouped product takes rows of weights that are a multiple of so many bytes."""


_MOST_BYTES = 1 << 32
"""Every rank permutes the rows of all ranks; beyond this size they may not fit."""


def refusal(terms: Terms) -> str | None:
    """Return what a call must have for ``impl="nccl"`` and has not, or None."""
    sizes, itemsize = terms.sizes, terms.dtype.itemsize
    widths = (sizes.hidden * itemsize, sizes.ffn * itemsize)
    rules = (
        (hasattr(torch, "_grouped_mm"), "a PyTorch with torch._grouped_mm"),
        (terms.device_type == "cpu" or terms.dtype == torch.bfloat16, "bfloat16 operands"),
        (
            not any(width % _ALIGNMENT_BYTES for width in widths),
            f"hidden and F that are multiples of {_ALIGNMENT_BYTES} bytes",
        ),
        (
            sizes.world_size
            * sizes.slots
            * ((sizes.gates + 1) * sizes.ffn + 2 * sizes.hidden)
            * itemsize
            <= _MOST_BYTES,
            f"at most {_MOST_BYTES >> 30} GiB of rows of all ranks",
        ),
        *terms.inference_rules,
    )
    return " and ".join(rule for holds, rule in rules if not holds) or None


def run(call: Call) -> torch.Tensor:
    """All-gather tokens and routing, multiply the rows of this rank's experts, reduce-scatter.

    The sum over a token's experts is in the dtype of x, unlike that of the other implementations.
    """
    group = process_group_named(call.group_name)
    splits = [call.sizes.tokens] * call.sizes.world_size
    x = gather_rows(call.x, splits, group)
    routing = gather_rows(routing_of(call), splits, group)
    return sum_rows(sums_of_experts(call, x, routing), splits, group)


def routing_of(call: Call) -> torch.Tensor:
    """Return the experts of this rank's tokens and then their weights, float32 ``[T, 2 k]``."""
    # A dropped slot's weight may be NaN, which a result of 0 would not hide.
    is_named = (call.experts >= 0) & (call.experts < call.sizes.experts)
    weights = torch.where(is_named, call.weights, 0.0)
    return torch.cat([call.experts.float(), weights], 1)


def sums_of_experts(call: Call, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """Return the parts of tokens' sums that are of this rank's experts, ``[M, hidden]``.

    Args:
        x: Tokens of any ranks, ``[M, hidden]``.
        routing: Their experts and weights, as :func:`routing_of` returns them.
    """
    sizes, top_k, local = call.sizes, call.sizes.top_k, call.sizes.local
    expert = routing[:, :top_k].flatten().to(torch.int64) - call.group.rank * local
    # Rows of other ranks' experts are sorted behind those of this rank's.
    expert = torch.where((expert >= 0) & (expert < local), expert, local)
    sorted_experts, order = expert.sort(stable=True)
    numbers = torch.arange(local, device=x.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True).to(torch.int32)
    w_in, in_order = layout.in_memory_order(call.w_in)
    lines = sizes.gates * sizes.ffn
    if in_order.along_k:
        w_in = w_in.reshape(local, lines, sizes.hidden).transpose(1, 2)
    else:
        w_in = w_in.reshape(local, sizes.hidden, lines)
    both = torch._grouped_mm(x[order // top_k], w_in, offs=ends)
    # Rows of other ranks' experts take any expert's bias.
    owner = sorted_experts.clamp(max=local - 1)
    if call.b_in is not None:
        both = both + layout.bias_in_order(call.b_in, in_order).view(local, lines)[owner]
    if in_order.halves:
        gates = both.view(-1, sizes.gates, sizes.ffn).unbind(1)
    else:
        gates = both.view(-1, sizes.ffn, sizes.gates).unbind(2)
    active = ExpertActivation.parse(call.activation)(*gates)
    w_out, out_order = layout.in_memory_order(call.w_out)
    w_out = w_out.transpose(1, 2) if out_order.along_k else w_out
    results = torch._grouped_mm(active, w_out, offs=ends)
    if call.b_out is not None:
        results = results + call.b_out[owner]
    # The product leaves rows behind the last expert's undefined, perhaps NaN.
    results = torch.where((sorted_experts < local)[:, None], results, 0)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=x.device)
    rows = results[positions].view(len(x), top_k, -1)
    return torch.bmm(routing[:, None, top_k:].to(x.dtype), rows)[:, 0]
