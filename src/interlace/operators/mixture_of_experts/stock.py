"""``impl="nccl"``: the layer in stock PyTorch that never waits for the host, as servers run it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from interlace.comm import process_group_named
from interlace.gemm.reference import gather_rows, sum_rows
from interlace.operators.mixture_of_experts import layout
from interlace.operators.mixture_of_experts.activation import ExpertActivation

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import LayerCall
    from interlace.operators.mixture_of_experts.choice import ExpertTerms

_ALIGNMENT_BYTES = 16
"""PyTorch's grouped product takes rows of weights that are a multiple of so many bytes."""


_MOST_BYTES = 1 << 32
"""Every rank permutes the rows of all ranks; beyond this size they may not fit."""


def refusal(terms: ExpertTerms) -> str | None:
    """Return what a call must have for ``impl="nccl"`` and has not, or None."""
    return unmet((*grouped_rules(terms), *terms.inference_rules))


def unmet(rules: Iterable[tuple[bool, str]]) -> str | None:
    """Return the rules that do not hold in words, or None."""
    return " and ".join(rule for holds, rule in rules if not holds) or None


def grouped_rules(terms: ExpertTerms) -> tuple[tuple[bool, str], ...]:
    """Return what PyTorch's grouped products of all ranks' rows need, and whether it is so."""
    sizes, itemsize = terms.sizes, terms.dtype.itemsize
    widths = (sizes.hidden * itemsize, sizes.ffn * itemsize)
    return (
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
    )


def run(call: LayerCall) -> torch.Tensor:
    """All-gather tokens and routing, multiply the rows of this rank's experts, reduce-scatter.

    The sum over a token's experts is in the dtype of x, unlike that of the other implementations.
    """
    group = process_group_named(call.group_name)
    splits = [call.sizes.tokens] * call.sizes.world_size
    x = gather_rows(call.x, splits, group)
    routing = gather_rows(routing_of(call), splits, group)
    return sum_rows(sums_of_experts(call, x, routing), splits, group)


def routing_of(call: LayerCall) -> torch.Tensor:
    """Return the experts of this rank's tokens and then their weights, float32 ``[T, 2 k]``."""
    # A dropped slot's weight may be NaN, which a result of 0 would not hide.
    is_named = (call.experts >= 0) & (call.experts < call.sizes.experts)
    weights = torch.where(is_named, call.weights, 0.0)
    return torch.cat([call.experts.float(), weights], 1)


class ByExpert(NamedTuple):
    """The slots of some tokens, sorted by expert; those of other ranks' experts come last.

    Attributes:
        experts: int64 ``[M * top_k]``, the number of each row's expert among this rank's; the
            number of experts stands for another rank's.
        order: int64 ``[M * top_k]``, the slot of each row.
        ends: int32 ``[experts of this rank]``, the row behind each expert's last one.
    """

    experts: torch.Tensor
    order: torch.Tensor
    ends: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        """The row of each slot."""
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(self.order), device=places.device)
        return places


def by_expert(call: LayerCall, routing: torch.Tensor) -> ByExpert:
    """Sort the slots of tokens, whose experts and weights ``routing`` has."""
    top_k, local = call.sizes.top_k, call.sizes.local
    expert = routing[:, :top_k].flatten().to(torch.int64) - call.group.rank * local
    expert = torch.where((expert >= 0) & (expert < local), expert, local)
    experts, order = expert.sort(stable=True)
    return ByExpert(experts, order, ends_of(experts, local))


def ends_of(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Return the row behind the last one of each of ``count`` experts; ``experts`` ascend."""
    numbers = torch.arange(count, device=experts.device)
    return torch.searchsorted(experts, numbers, right=True).to(torch.int32)


def first_weight(call: LayerCall) -> tuple[torch.Tensor, layout.Order]:
    """Return w_in as a grouped product takes it, ``[experts, hidden, gates * F]``, and the order of
    its columns.
    """
    sizes = call.sizes
    w_in, in_order = layout.in_memory_order(call.w_in)
    lines = sizes.gates * sizes.ffn
    if in_order.along_k:
        return w_in.reshape(sizes.local, lines, sizes.hidden).transpose(1, 2), in_order
    return w_in.reshape(sizes.local, sizes.hidden, lines), in_order


def second_weight(call: LayerCall) -> torch.Tensor:
    """Return w_out as a grouped product takes it, ``[experts, F, hidden]``."""
    w_out, out_order = layout.in_memory_order(call.w_out)
    return w_out.transpose(1, 2) if out_order.along_k else w_out


def sums_of_experts(call: LayerCall, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """Return the parts of tokens' sums that are of this rank's experts, ``[M, hidden]``.

    Args:
        x: Tokens of any ranks, ``[M, hidden]``.
        routing: Their experts and weights, as :func:`routing_of` returns them.
    """
    sizes, top_k, local = call.sizes, call.sizes.top_k, call.sizes.local
    rows = by_expert(call, routing)
    w_in, in_order = first_weight(call)
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
    results = torch._grouped_mm(active, second_weight(call), offs=rows.ends)
    if call.b_out is not None:
        results = results + call.b_out[owner]
    # The product leaves rows behind the last expert's undefined, perhaps NaN.
    results = torch.where((rows.experts < local)[:, None], results, 0)
    slots = results[rows.places].view(len(x), top_k, -1)
    return torch.bmm(routing[:, None, top_k:].to(x.dtype), slots)[:, 0]
