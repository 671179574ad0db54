"""``impl="unfused"``: the layer in stock PyTorch, in one of two ways.

As servers run it, by grouped products between an all-gather and a reduce-scatter, which the host
does not wait for; and calls that these do not take, such as those with gradients, by one expert
after another between two all-to-alls, for whose sizes the host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import _C

from interlace.comm import process_group_named
from interlace.gemm import products, scaled
from interlace.gemm.operands import RowPart, Weight
from interlace.gemm.reference import exchange_rows, gather_rows, is_alone, sum_rows
from interlace.operators.mixture_of_experts import grouped
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.call import LayerCall
from interlace.operators.mixture_of_experts.choice import ExpertTerms, unmet
from interlace.operators.mixture_of_experts.layout import Parameters, Saved, WeightScales

_AUTOGRAD = _C.DispatchKeySet(_C.DispatchKey.AutogradCPU) | _C.DispatchKeySet(
    _C.DispatchKey.AutogradCUDA
)


def is_grouped(terms: ExpertTerms) -> bool:
    """Return whether a call runs by grouped products."""
    rules = (*grouped.rules(terms), *terms.inference_rules)
    return terms.sizes.tokens > 0 and unmet(rules) is None


def run(call: LayerCall) -> tuple[torch.Tensor, Saved]:
    """Return ``y [T, hidden]``; tensors for the backward pass are not filled."""
    # The operator has a backward pass of its own, so nothing is recorded here.
    with torch.no_grad():
        if is_grouped(call.terms):
            y = _layer_of_groups(call)
        else:
            y = _layer(call, call.x, call.weights, call.parameters)
    return y.contiguous(), call.unused()


def backward(
    call: LayerCall, grad: torch.Tensor, saved: Saved, needed: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of x, weights, w_in, w_out, b_in and b_out.

    The forward pass, which saved nothing, runs again, one expert after another. The last four are
    empty unless they are ``needed``.
    """
    x, weights = (tensor.detach().requires_grad_() for tensor in (call.x, call.weights))
    parameters = Parameters._make(
        None if tensor is None else tensor.detach().requires_grad_() for tensor in call.parameters
    )
    present = [parameter for parameter in parameters if parameter is not None]
    # Below a mode that looks at every operator, such as a counter of operations, autograd is off.
    include, exclude = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    with torch.enable_grad(), _C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD):
        y = _layer(call, x, weights, parameters)
        found = torch.autograd.grad(
            y, [x, weights, *present], grad, allow_unused=True, materialize_grads=True
        )
    of_present = dict(zip(map(id, present), found[2:], strict=True))
    gradients = call.parameters.gradients(needed)
    for target, parameter in zip(gradients, parameters, strict=True):
        if target.numel():
            target.copy_(of_present[id(parameter)])
    return found[0].contiguous(), found[1].contiguous(), *gradients


def _layer(
    call: LayerCall, x: torch.Tensor, weights: torch.Tensor, parameters: Parameters
) -> torch.Tensor:
    """Sort, all-to-all, one expert after another, all-to-all, weighted sum; differentiable."""
    activation, experts = ExpertActivation.parse(call.activation), call.experts
    group = process_group_named(call.group_name)
    local = parameters.w_in.shape[0]
    rank, ranks = (0, 1) if is_alone(group) else (dist.get_rank(group), dist.get_world_size(group))
    chosen = experts.reshape(-1)
    # Slots beyond the capacity are dropped by token and then by j, as the kernels drop them.
    slots = [(chosen == number).nonzero()[: call.capacity, 0] for number in range(ranks * local)]
    order = torch.cat(slots)
    counts = torch.tensor([len(part) for part in slots], device=x.device)
    of_ranks = [counts]
    if ranks > 1:
        of_ranks = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(of_ranks, counts, group=group)
    # [source][local expert]
    own_counts = [part[rank * local : (rank + 1) * local].tolist() for part in of_ranks]
    sent, arriving = counts.view(ranks, local).sum(1).tolist(), [sum(part) for part in own_counts]
    exchange: Callable[..., torch.Tensor] = _AllToAll.apply
    received = exchange(x[order // experts.shape[1]], arriving, sent, group)
    # Rows arrive by source, and those of a source by expert.
    owner = torch.cat(
        [
            torch.full((count,), number, device=x.device)
            for part in own_counts
            for number, count in enumerate(part)
        ]
    )
    scales = call.weight_scales
    results = torch.zeros_like(received)
    # Experts one by one, obviously right; index_copy lets gradients through.
    for number in range(local):
        rows = (owner == number).nonzero()[:, 0]
        if scales is None:
            computed = _expert(number, received[rows], parameters, activation)
        else:
            computed = _float8_expert(number, received[rows], parameters, scales, activation)
        results = results.index_copy(0, rows, computed)
    returned = exchange(results, sent, arriving, group)
    rows = returned.new_zeros(experts.numel(), x.shape[1]).index_copy(0, order, returned)
    # A dropped slot's weight may be NaN, which 0 would not hide.
    is_kept = torch.zeros_like(chosen, dtype=torch.bool).index_fill(0, order, True)
    weights = torch.where(is_kept.view_as(weights), weights, 0.0)
    return (rows.view(*experts.shape, x.shape[1]).float() * weights[..., None]).sum(1).to(x.dtype)


def _expert(
    number: int, rows: torch.Tensor, parameters: Parameters, activation: ExpertActivation
) -> torch.Tensor:
    """Return the results ``[M, hidden]`` of one expert's ``rows [M, hidden]``."""
    w_in, w_out = parameters.w_in[number], parameters.w_out[number]
    b_in, b_out = (None if parameter is None else parameter[number] for parameter in parameters[2:])
    gates = [
        F.linear(rows, w_in[:, i], None if b_in is None else b_in[:, i])
        for i in range(w_in.shape[1])
    ]
    return F.linear(activation(*gates), w_out, b_out)


def _float8_expert(
    number: int,
    rows: torch.Tensor,
    parameters: Parameters,
    scales: WeightScales,
    activation: ExpertActivation,
) -> torch.Tensor:
    """Return the same for float8 weights: rows, and their activation, become float8."""

    def product(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(len(x), len(w))
        weight = Weight(w, w.T, scale.contiguous())
        products.multiply_into(y, RowPart(*scaled.quantised(x)), weight)
        return y

    w_in, in_scale = parameters.w_in[number], scales.of_in[number]
    gate, up = (product(rows, w_in[:, i], in_scale[:, i]) for i in range(2))
    return product(activation(gate, up), parameters.w_out[number], scales.of_out[number])


class _AllToAll(torch.autograd.Function):
    """Send rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, arriving: list[int], sent: list[int], group: Any
    ) -> torch.Tensor:
        ctx.splits = arriving, sent, group
        return exchange_rows(rows, sent, arriving, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        arriving, sent, group = ctx.splits
        return exchange_rows(grads[0], arriving, sent, group), None, None, None


def _layer_of_groups(call: LayerCall) -> torch.Tensor:
    """All-gather tokens and routing, multiply the rows of this rank's experts, reduce-scatter.

    The sum over a token's experts is in the dtype of x, unlike that of :func:`_layer` and of the
    other implementations.
    """
    group = process_group_named(call.group_name)
    splits = [call.sizes.tokens] * call.sizes.world_size
    x = gather_rows(call.x, splits, group)
    routing = gather_rows(grouped.routing_of(call), splits, group)
    return sum_rows(_sums_of_experts(call, x, routing), splits, group)


def _sums_of_experts(call: LayerCall, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """Return the parts of tokens' sums that are of this rank's experts, ``[M, hidden]``.

    Args:
        x: Tokens of any ranks, ``[M, hidden]``.
        routing: Their experts and weights, as :func:`grouped.routing_of` returns them.
    """
    sizes, top_k, local = call.sizes, call.sizes.top_k, call.sizes.local
    rows = grouped.by_expert(call, routing)
    parameters = call.parameters.readable()
    w_in, w_out = parameters.right_operands
    both = torch._grouped_mm(x[rows.order // top_k], w_in, offs=rows.ends)
    # Rows of other ranks' experts take any expert's bias.
    owner = rows.experts.clamp(max=local - 1)
    if parameters.b_in is not None:
        both = both + parameters.b_in[owner]
    if parameters.in_order.halves:
        gates = both.view(-1, sizes.gates, sizes.ffn).unbind(1)
    else:
        gates = both.view(-1, sizes.ffn, sizes.gates).unbind(2)
    active = ExpertActivation.parse(call.activation)(*gates)
    results = torch._grouped_mm(active, w_out, offs=rows.ends)
    if call.b_out is not None:
        results = results + call.b_out[owner]
    # The product leaves rows behind the last expert's undefined, perhaps NaN.
    results = torch.where((rows.experts < local)[:, None], results, 0)
    slots = results[rows.places].view(len(x), top_k, -1)
    return torch.bmm(routing[:, None, top_k:].to(x.dtype), slots)[:, 0]
