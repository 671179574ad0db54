"""Running ``mixture_of_experts``, forward and backward: memory and launches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import _C

from interlace.comm import process_group_named
from interlace.comm.launching.kernels import Launch
from interlace.comm.runtime.interpreter import require
from interlace.gemm.invariance import effective_impl
from interlace.operators.mixture_of_experts import (
    between_nodes,
    decode,
    layout,
    reference,
    stock,
)
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.backward_steps import BackwardSteps
from interlace.operators.mixture_of_experts.call import LayerCall, Saved
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.operators.mixture_of_experts.layout import Parameters
from interlace.operators.mixture_of_experts.steps import Steps
from interlace.registry import operator_named

_BLOCK_SLOTS = 128
_BACKWARD = f"{OPERATOR}.backward"
_AUTOGRAD = _C.DispatchKeySet(_C.DispatchKey.AutogradCPU) | _C.DispatchKeySet(
    _C.DispatchKey.AutogradCUDA
)


def run(call: LayerCall) -> tuple[torch.Tensor, Saved]:
    """Run the forward pass; return ``y [T, hidden]`` and the tensors for the backward pass.

    Raises:
        ArgumentError: The call cannot run by the implementation that was asked for, or be
            batch-invariant.
    """
    call = dataclasses.replace(call, impl=effective_impl(operator_named(OPERATOR), call.impl))
    group = call.group
    group.check()
    mark = call.agree(OPERATOR)
    impl, _ = call.chosen
    # All ranks have the same number of tokens, so they all leave the fused path together.
    if call.sizes.tokens and impl == "fused":
        launches, y, saved, may_keep = prepare_forward(call, mark)
        with call.range(OPERATOR), group.running():
            for launch in launches:
                launch()
        if not call.saves:
            return y, unused(call)
        # The landing is written again by the next call, so its rows cannot be kept for the backward
        # pass, but must be copied.
        return y, saved if may_keep else dataclasses.replace(saved, received=saved.received.clone())
    if call.sizes.tokens and impl == "decode":
        launches, y = decode.prepare(call, mark)
        with call.range(OPERATOR), group.running():
            for launch in launches:
                launch()
        return y, unused(call)
    with call.range(OPERATOR):
        if not call.sizes.tokens or impl == "unfused":
            y = _unfused(call)
        elif impl == "nccl":
            y = stock.run(call)
        else:
            y = between_nodes.run(call, mark)
    return y.contiguous(), unused(call)


def run_backward(
    call: LayerCall, grad: torch.Tensor, saved: Saved, needed: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of x, weights, w_in, w_out, b_in and b_out.

    The last four are empty unless they are ``needed``.
    """
    group = call.group
    group.check()
    mark = call.agree(_BACKWARD)
    impl, _ = call.chosen
    if impl == "chunked" and call.sizes.tokens:
        with call.range(_BACKWARD):
            return between_nodes.run_backward(call, mark, grad, needed)
    if impl == "unfused" or not (call.sizes.tokens and call.saves):
        with call.range(_BACKWARD):
            return _unfused_gradients(call, grad, needed)
    launches, gradients = prepare_backward(call, mark, grad, saved, needed)
    with call.range(_BACKWARD), group.running():
        for launch in launches:
            launch()
    return gradients


def _new(call: LayerCall) -> Callable[..., torch.Tensor]:
    """Return what makes new tensors of a call."""
    # On the CPU backend memory without rows is zero, so that torch's checks compare equal numbers.
    return torch.zeros if call.group.backend == "cpu" else torch.empty


def unused(call: LayerCall) -> Saved:
    """Return the saved tensors of a call whose backward pass needs only their shapes."""
    return Saved.empty(call.sizes, call.x, call.saves, _new(call))


# The forward pass


def prepare_forward(call: LayerCall, mark: int) -> tuple[list[Launch], torch.Tensor, Saved, bool]:
    """Prepare the launches of the forward pass, in order. Collective when memory must grow.

    They are: count, plan, dispatch and first product, second product and combine, sum.

    Returns:
        The launches, y, the tensors for the backward pass, and whether ``received`` may be kept or
        must be copied at once.
    """
    group, sizes = call.group, call.sizes
    require(group.backend)
    from interlace.operators.mixture_of_experts.kernels.plan import count_slots, plan_call

    tools = Steps(call, OPERATOR, mark)
    device = call.x.device
    # Rows that the backward pass needs arrive in a buffer that stays in use until then.
    space = (
        group.outputs.take(tools.buffer_bytes)
        if call.saves
        else group.outputs.landing(tools.buffer_bytes)
    )
    shape = (sizes.arrivals, sizes.hidden)
    received = space.tensor(shape, call.x.dtype, device)
    new = functools.partial(_new(call), device=device)
    plan, slot_at = new(sizes.plan, dtype=torch.int32), new(sizes.returns, dtype=torch.int32)
    slot_rows = new((sizes.tokens, sizes.top_k), dtype=torch.int32)
    active = new((sizes.arrivals, sizes.ffn), dtype=call.x.dtype)
    kept = new((sizes.gates, sizes.arrivals, sizes.ffn) if call.saves else 0, dtype=call.x.dtype)
    grants = new(sizes.world_size, dtype=torch.int32)
    saved = Saved(plan, slot_rows, slot_at, received, kept)
    y = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    blocks = layout.blocks(sizes.slots, _BLOCK_SLOTS)
    # Counting per block lets every block number its slots without waiting for the blocks before it.
    histograms = new((blocks, tools.lanes["E_LANES"]), dtype=torch.int32)
    experts = call.experts.contiguous()
    count = Launch(
        count_slots,
        (blocks,),
        {
            "experts": experts,
            "histograms": histograms,
            "slots": sizes.slots,
            "E": sizes.experts,
        },
        {"E_LANES": tools.lanes["E_LANES"], "BLOCK": _BLOCK_SLOTS},
    )
    numbers = tools.workspace
    arguments = {
        "experts": experts,
        "histograms": histograms,
        "slot_rows": slot_rows,
        "slot_at": slot_at,
        "plan": plan,
        "grants": grants,
        "numbers": numbers.data.address,
        "signals": numbers.signals.address,
        "epochs": numbers.epochs,
        "ctx": tools.context,
        "call": mark,
        "half": numbers.half_bytes,
        "buffer_index": space.index,
        "slots": sizes.slots,
        "capacity": sizes.capacity,
        "E": sizes.experts,
        "L": sizes.local,
    }
    # With so many warps, the comparisons of slots with experts fit in registers.
    warps = max(4, min(32, tools.lanes["E_LANES"] // 16))
    constants = {
        "WORLD_SIZE": sizes.world_size,
        **tools.lanes,
        "BLOCK": _BLOCK_SLOTS,
        "num_warps": warps,
    }
    agree = Launch(plan_call, (blocks,), arguments, constants)
    first = tools.dispatch(
        call.x, saved, active, space, kept=kept if call.saves else None, grants=grants
    )
    second = tools.combine(plan, active)
    total = tools.sum(saved, call.weights, y, None)
    return [count, agree, first, second, total], y, saved, space.lent


# The backward pass


def prepare_backward(
    call: LayerCall, mark: int, grad: torch.Tensor, saved: Saved, needed: Sequence[bool]
) -> tuple[list[Launch], tuple[torch.Tensor, ...]]:
    """Prepare the launches of the backward pass, in order.

    They are: dispatch of gradients and product with w_out; activation; product with w_in and
    combine; gradients of the weights and biases, while the peers' results arrive; sum.
    """
    group, sizes = call.group, call.sizes
    require(group.backend)

    tools = BackwardSteps(call, _BACKWARD, mark)
    like, rows = call.x, sizes.arrivals
    product_gradient, scaled = like.new_empty(rows, sizes.ffn), like.new_empty(rows, sizes.ffn)
    inner_gradient = like.new_empty(rows, sizes.gates * sizes.ffn)
    factors = None if call.b_out is None else like.new_empty(rows, dtype=torch.float32)
    grad_x, grad_weights = (
        torch.empty_like(like, memory_format=torch.contiguous_format),
        torch.empty_like(call.weights, memory_format=torch.contiguous_format),
    )
    space = group.outputs.landing(tools.buffer_bytes)
    met = torch.empty(1, dtype=torch.int32, device=like.device)
    arrived = space.tensor((rows, sizes.hidden), like.dtype, like.device)
    launches = [
        tools.dispatch(grad, saved, product_gradient, space, scales=call.weights, met=met),
        tools.activation(saved, met, product_gradient, inner_gradient, scaled, arrived, factors),
        tools.combine(saved.plan, inner_gradient, met=met),
    ]
    grads = call.parameters.gradients(needed)
    grad_in, grad_out, grad_b_in, grad_b_out = grads
    if needed[0]:
        # The columns of the gradient in memory are those of the second operand.
        pair = inner_gradient, saved.received
        left, right = pair if tools.in_order.along_k else pair[::-1]
        target, _ = layout.in_memory_order(grad_in)
        launches.append(tools.gradient(saved.plan, left, right, target))
    if needed[1]:
        pair = arrived, scaled
        left, right = pair if tools.out_order.along_k else pair[::-1]
        target, _ = layout.in_memory_order(grad_out)
        launches.append(tools.gradient(saved.plan, left, right, target))
    if grad_b_in.numel():
        launches.append(tools.bias_gradient(saved.plan, inner_gradient, None, grad_b_in))
    if grad_b_out.numel():
        launches.append(tools.bias_gradient(saved.plan, arrived, factors, grad_b_out))
    launches.append(tools.sum(saved, None, grad_x, grad_weights))
    return launches, (grad_x, grad_weights, *grads)


# The unfused way


def _unfused(call: LayerCall) -> torch.Tensor:
    # The operator has a backward pass of its own, so nothing is recorded here.
    with torch.no_grad():
        return _reference(call, call.x, call.weights, call.parameters)


def _reference(
    call: LayerCall, x: torch.Tensor, weights: torch.Tensor, parameters: Parameters
) -> torch.Tensor:
    activation = ExpertActivation.parse(call.activation)
    process_group = process_group_named(call.group_name)
    return reference.mixture_of_experts(
        x, call.experts, weights, parameters, activation, call.capacity, process_group
    )


def _unfused_gradients(
    call: LayerCall, grad: torch.Tensor, needed: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients by running the forward pass again, which saved nothing."""
    x, weights = (tensor.detach().requires_grad_() for tensor in (call.x, call.weights))
    parameters = Parameters._make(
        None if tensor is None else tensor.detach().requires_grad_() for tensor in call.parameters
    )
    present = [parameter for parameter in parameters if parameter is not None]
    # Below a mode that looks at every operator, such as a counter of operations, autograd is off.
    include, exclude = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    with torch.enable_grad(), _C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD):
        y = _reference(call, x, weights, parameters)
        found = torch.autograd.grad(
            y, [x, weights, *present], grad, allow_unused=True, materialize_grads=True
        )
    of_present = dict(zip(map(id, present), found[2:], strict=True))
    gradients = call.parameters.gradients(needed)
    for target, parameter in zip(gradients, parameters, strict=True):
        if target.numel():
            target.copy_(of_present[id(parameter)])
    return found[0].contiguous(), found[1].contiguous(), *gradients
