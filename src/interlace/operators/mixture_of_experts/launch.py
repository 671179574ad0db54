"""Calls of ``mixture_of_experts``: implementation, configuration, memory, and their launches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import torch

from interlace.comm import Group, group_named, process_group_named, ranges
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch
from interlace.errors import ArgumentError
from interlace.gemm import invariance
from interlace.gemm.between_nodes import known_network
from interlace.operators.mixture_of_experts import decode, layout, reference, stock
from interlace.operators.mixture_of_experts.choice import Terms, choose, configuration
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.layout import MAX_RANKS, Sizes
from interlace.operators.mixture_of_experts.steps import Steps
from interlace.registry import operator_named

_BLOCK_SLOTS = 128
_BACKWARD = f"{OPERATOR}.backward"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call whose shapes and devices ``api`` has validated; see ``op`` for the fields.

    Attributes:
        keeps: Whether a backward pass will follow.
    """

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    w_in: torch.Tensor
    w_out: torch.Tensor
    capacity: int
    group_name: str
    impl: str
    config: str
    keeps: bool

    def __post_init__(self) -> None:
        dtypes = [tensor.dtype for tensor in (self.x, self.w_in, self.w_out)]
        if len(set(dtypes)) > 1:
            raise ArgumentError(
                f"{OPERATOR}: x, w_in and w_out must have the same dtype; got {dtypes}. Convert "
                "them."
            )

    @functools.cached_property
    def group(self) -> Group:
        return group_named(self.group_name, self.x.device)

    @functools.cached_property
    def sizes(self) -> Sizes:
        tokens, hidden = self.x.shape
        ranks, local = self.group.world_size, self.w_in.shape[0]
        return Sizes(
            tokens,
            self.experts.shape[1],
            ranks * local,
            hidden,
            self.w_in.shape[1],
            ranks,
            self.capacity,
        )

    def agree(self, operator: str) -> int:
        """Agree on this call with all ranks; return its mark (``Group.agree``)."""
        self.group.require_size(OPERATOR, MAX_RANKS)
        return self.group.agree(
            operator,
            the_shape_of_x=tuple(self.x.shape),
            top_k=self.experts.shape[1],
            experts_of_a_rank=self.w_in.shape[0],
            the_inner_width=self.w_in.shape[1],
            dtype=str(self.x.dtype),
            capacity=self.capacity,
            whether_gradients_are_needed=self.keeps,
            impl=self.impl,
            config=self.config,
        )

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return the range of this call for profilers, by the name of the operator or its half.

        The bytes that it sends are unknown: only the device knows how many rows go where.
        """
        operands = (self.x, self.experts, self.w_in, self.w_out)
        return ranges.around(name, self.chosen[0], operands, lambda: None)

    @functools.cached_property
    def chosen(self) -> tuple[str, MixtureOfExpertsConfig]:
        """The implementation and the configuration of this call.

        Raises:
            ArgumentError: The implementation was asked for and cannot run such a call.
        """
        terms = Terms(self.sizes, self.x.dtype, self.x.device.type, self.keeps)
        declaration = operator_named(OPERATOR)
        declaration.require_nodes(self.impl, self.group.nodes)
        network = known_network(self.x.device)
        choice = choose(terms, self.x.device).between(declaration, self.group.nodes, network, terms)
        impl = choice.impl if self.impl == "auto" else self.impl
        unmet = declaration.refusal(impl, terms)
        if unmet is not None:
            raise ArgumentError(
                f"{OPERATOR}: impl={impl!r} must have {unmet}. Take impl='auto' or 'fused'."
            )
        if self.config:
            return impl, MixtureOfExpertsConfig.parse(self.config)
        return impl, configuration(impl, terms, self.x.device)


@dataclasses.dataclass(frozen=True)
class Saved:
    """The tensors of the forward pass that the backward pass needs, besides the call's arguments.

    They are empty if there will be no backward pass.

    Attributes:
        plan: int32; see ``layout``.
        slot_rows: int32 ``[T, k]``: the row at which a slot's result comes back; -1 if it was
            dropped.
        slot_at: int32 ``[returns]``: the slot of each row of results.
        received: ``[arrivals, hidden]``: rows of this rank's experts.
        kept: ``[2, arrivals, ffn]``: gate and up of these rows.
    """

    plan: torch.Tensor
    slot_rows: torch.Tensor
    slot_at: torch.Tensor
    received: torch.Tensor
    kept: torch.Tensor


def run(call: Call) -> tuple[torch.Tensor, Saved]:
    """Run the forward pass; return ``y [T, hidden]`` and the tensors for the backward pass.

    Raises:
        ArgumentError: The call must be batch-invariant: which rows share a tile, and which
            implementation runs, goes by the number of tokens.
    """
    if invariance.is_enabled():
        invariance.refuse(OPERATOR)
    group = call.group
    group.check()
    mark = call.agree(OPERATOR)
    impl, _ = call.chosen
    # All ranks have the same number of tokens, so they all leave the fused path together.
    if call.sizes.tokens == 0 or impl == "unfused":
        with call.range(OPERATOR):
            return _unfused(call), nothing(call.x)
    if impl == "decode":
        launches, y = decode.prepare(call, mark)
        with call.range(OPERATOR), group.running():
            for launch in launches:
                launch()
        return y, nothing(call.x)
    if impl == "nccl":
        with call.range(OPERATOR):
            return stock.run(call), nothing(call.x)
    launches, y, saved, may_keep = prepare_forward(call, mark)
    with call.range(OPERATOR), group.running():
        for launch in launches:
            launch()
    if not call.keeps:
        return y, nothing(call.x)
    # The landing is written again by the next call, so its rows cannot be kept for the backward
    # pass, but must be copied.
    return y, saved if may_keep else dataclasses.replace(saved, received=saved.received.clone())


def run_backward(
    call: Call, grad: torch.Tensor, saved: Saved, needed: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of x, weights, w_in and w_out; the last two only if ``needed``."""
    group = call.group
    group.check()
    mark = call.agree(_BACKWARD)
    impl, _ = call.chosen
    if call.sizes.tokens == 0 or impl == "unfused":
        with call.range(_BACKWARD):
            return _unfused_gradients(call, grad)
    launches, gradients = prepare_backward(call, mark, grad, saved, needed)
    with call.range(_BACKWARD), group.running():
        for launch in launches:
            launch()
    return gradients


def nothing(like: torch.Tensor) -> Saved:
    """Return the empty tensors of a call that saves nothing."""
    plan, slot_rows, slot_at = (like.new_empty(0, dtype=torch.int32) for _ in range(3))
    return Saved(plan, slot_rows, slot_at, like.new_empty(0), like.new_empty(0))


# The forward pass


def prepare_forward(call: Call, mark: int) -> tuple[list[Launch], torch.Tensor, Saved, bool]:
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
        if call.keeps
        else group.outputs.landing(tools.buffer_bytes)
    )
    shape = (sizes.arrivals, sizes.hidden)
    received = space.tensor(shape, call.x.dtype, device)
    # On the CPU backend memory without rows is zero, so that torch's checks compare equal numbers.
    new = functools.partial(torch.zeros if group.backend == "cpu" else torch.empty, device=device)
    plan, slot_at = new(sizes.plan, dtype=torch.int32), new(sizes.returns, dtype=torch.int32)
    slot_rows = new((sizes.tokens, sizes.top_k), dtype=torch.int32)
    active = new((sizes.arrivals, sizes.ffn), dtype=call.x.dtype)
    kept = new((2, sizes.arrivals, sizes.ffn) if call.keeps else 0, dtype=call.x.dtype)
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
        call.x, saved, tools.w_in, active, space, kept=kept if call.keeps else None, grants=grants
    )
    second = tools.combine(plan, active, call.w_out, transposed=True)
    total = tools.sum(saved, call.weights, y, None)
    return [count, agree, first, second, total], y, saved, space.lent


# The backward pass


def prepare_backward(
    call: Call, mark: int, grad: torch.Tensor, saved: Saved, needed: Sequence[bool]
) -> tuple[list[Launch], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Prepare the launches of the backward pass, in order.

    They are: dispatch of gradients and product with w_out; activation; product with w_in and
    combine; gradients of the weights, while the peers' results arrive; sum.
    """
    group, sizes = call.group, call.sizes
    require(group.backend)

    tools = Steps(call, _BACKWARD, mark)
    like, rows = call.x, sizes.arrivals
    product_gradient, scaled = like.new_empty(rows, sizes.ffn), like.new_empty(rows, sizes.ffn)
    inner_gradient = like.new_empty(rows, 2 * sizes.ffn)
    grad_x, grad_weights = (
        torch.empty_like(like, memory_format=torch.contiguous_format),
        torch.empty_like(call.weights),
    )
    space = group.outputs.landing(tools.buffer_bytes)
    met = torch.empty(1, dtype=torch.int32, device=like.device)
    arrived = space.tensor((rows, sizes.hidden), like.dtype, like.device)
    launches = [
        tools.dispatch(
            grad, saved, call.w_out, product_gradient, space, scales=call.weights, met=met
        ),
        tools.activation(saved, met, product_gradient, inner_gradient, scaled, arrived),
        tools.combine(saved.plan, inner_gradient, tools.w_in, met=met, transposed=False),
    ]
    grad_in, grad_out = (
        layout.like(weight) if need else weight.new_empty(0)
        for weight, need in zip((call.w_in, call.w_out), needed, strict=True)
    )
    if needed[0]:
        target = layout.in_memory_order(grad_in)
        launches.append(tools.gradient(saved.plan, inner_gradient, saved.received, target))
    if needed[1]:
        launches.append(tools.gradient(saved.plan, arrived, scaled, grad_out))
    launches.append(tools.sum(saved, None, grad_x, grad_weights))
    return launches, (grad_x, grad_weights, grad_in, grad_out)


# The unfused way


def _unfused(call: Call) -> torch.Tensor:
    process_group = process_group_named(call.group_name)
    # The operator has a backward pass of its own, so nothing is recorded here.
    with torch.no_grad():
        return reference.mixture_of_experts(
            call.x, call.experts, call.weights, call.w_in, call.w_out, call.capacity, process_group
        )


def _unfused_gradients(
    call: Call, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients by running the forward pass again, which saved nothing."""
    process_group = process_group_named(call.group_name)
    leaves = [
        tensor.detach().requires_grad_() for tensor in (call.x, call.weights, call.w_in, call.w_out)
    ]
    with torch.enable_grad():
        x, weights, w_in, w_out = leaves
        y = reference.mixture_of_experts(
            x, call.experts, weights, w_in, w_out, call.capacity, process_group
        )
    grads = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    x_grad, weights_grad, w_in_grad, w_out_grad = (
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(grads, leaves, strict=True)
    )
    return x_grad, weights_grad, layout.like(w_in).copy_(w_in_grad), w_out_grad
