"""From a call to kernel launches: which implementation, which configuration, which memory, which
grids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace import tuning
from interlace.comm import Group, group_named, process_group_named
from interlace.comm.dlpack import bytes_at, view_as
from interlace.comm.group import MAX_PROGRAMS
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, processors, triton_dtype
from interlace.comm.outputs import Output
from interlace.errors import ArgumentError, GroupError
from interlace.gemm.launch import has_descriptors, tile_ns
from interlace.operators.mixture_of_experts import layout, reference
from interlace.operators.mixture_of_experts.config import (
    OPERATOR,
    MixtureOfExpertsConfig,
    default_config,
)
from interlace.operators.mixture_of_experts.layout import MAX_RANKS, Sizes
from interlace.units import ceil_div, next_power_of_2, round_up

_BLOCK_SLOTS = 128
_RESULTS = f"{OPERATOR}.results"
_BACKWARD = f"{OPERATOR}.backward"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What ``impl="auto"`` runs, and why."""

    impl: str
    config: MixtureOfExpertsConfig
    reason: str


@functools.cache
def choose(
    *,
    tokens: int,
    hidden: int,
    ffn: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
) -> Choice:
    """The fastest implementation by the tuned table of this GPU; on the CPU backend the fused one,
    in few programs.
    """
    config = default_config(ffn=ffn, itemsize=dtype.itemsize)
    if device.type == "cpu":
        small = dataclasses.replace(
            config, block_m=32, programs=2, push_programs=2, sum_programs=2, stagger=0
        )
        return Choice(
            "fused",
            small,
            "the cpu backend exists to run the kernels; no time measured on it means anything",
        )
    sizes = {"tokens": tokens, "hidden": hidden, "ffn": ffn, "experts": experts, "top_k": top_k}
    point = tuning.Point(
        world_size=world_size, dtype=str(dtype).removeprefix("torch."), sizes=sizes
    )
    found = tuning.nearest(OPERATOR, torch.cuda.get_device_name(device), point)
    if found is None:
        return Choice(
            "fused",
            config,
            "nothing was measured on this GPU near these sizes; the default configuration",
        )
    return Choice(found.impl, MixtureOfExpertsConfig.parse(found.config), found.reason)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call whose shapes and devices ``api`` has validated; see ``op`` for the fields.

    Attributes:
        keeps: whether the backward pass will come.
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
        """The mark of this call; see ``Group.agree``."""
        if self.group.world_size > MAX_RANKS:
            raise GroupError(
                f"{OPERATOR}: a group must have at most {MAX_RANKS} ranks; got "
                f"{self.group.world_size}."
            )
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

    @functools.cached_property
    def chosen(self) -> tuple[str, MixtureOfExpertsConfig]:
        """The implementation and the configuration."""
        sizes = self.sizes
        choice = choose(
            tokens=sizes.tokens, hidden=sizes.hidden, ffn=sizes.ffn, experts=sizes.experts,
            top_k=sizes.top_k, dtype=self.x.dtype, world_size=sizes.world_size,
            device=self.x.device,
        )  # fmt: skip
        config = MixtureOfExpertsConfig.parse(self.config) if self.config else choice.config
        return (choice.impl if self.impl == "auto" else self.impl), config


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the backward pass needs of the forward pass, beside its arguments; empty tensors if
    there will be none.

    Attributes:
        plan: int32; see ``layout``.
        slot_rows: int32 ``[T, k]``: the row at which a slot's result comes back; -1 if it was
            dropped.
        slot_at: int32 ``[returns]``: the reverse.
        received: ``[arrivals, hidden]``: rows of this rank's experts.
        kept: ``[2, arrivals, ffn]``: their gate and up.
    """

    plan: torch.Tensor
    slot_rows: torch.Tensor
    slot_at: torch.Tensor
    received: torch.Tensor
    kept: torch.Tensor


def run(call: Call) -> tuple[torch.Tensor, Saved]:
    """The forward pass: ``y [T, hidden]``, and what the backward pass needs."""
    group = call.group
    group.check()
    mark = call.agree(OPERATOR)
    impl, _ = call.chosen
    if call.sizes.tokens == 0 or impl == "unfused":
        return _unfused(call), nothing(call.x)
    launches, y, saved, lent = prepare_forward(call, mark)
    with group.running():
        for launch in launches:
            launch()
    if not call.keeps:
        return y, nothing(call.x)
    return y, saved if lent else dataclasses.replace(saved, received=saved.received.clone())


def run_backward(
    call: Call, grad: torch.Tensor, saved: Saved, wanted: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weights, w_in and w_out; empty ones of the last two where not ``wanted``."""
    group = call.group
    group.check()
    mark = call.agree(_BACKWARD)
    impl, _ = call.chosen
    if call.sizes.tokens == 0 or impl == "unfused":
        return _unfused_gradients(call, grad)
    launches, gradients = prepare_backward(call, mark, grad, saved, wanted)
    with group.running():
        for launch in launches:
            launch()
    return gradients


def nothing(like: torch.Tensor) -> Saved:
    """Of a call that saves nothing."""
    plan, slot_rows, slot_at = (like.new_empty(0, dtype=torch.int32) for _ in range(3))
    return Saved(plan, slot_rows, slot_at, like.new_empty(0), like.new_empty(0))


# The forward pass


def prepare_forward(call: Call, mark: int) -> tuple[list[Launch], torch.Tensor, Saved, bool]:
    """Its launches in order: count, plan, dispatch and first product, second product and combine,
    sum. Collective when memory must grow.

    Returns:
        launches, y, what is saved, and whether ``received`` may be kept or must be copied at once.
    """
    group, sizes = call.group, call.sizes
    require(group.backend)
    from interlace.operators.mixture_of_experts import kernel

    tools = _Tools(call, OPERATOR, mark)
    device = call.x.device
    space = (
        group.outputs.take(tools.buffer_bytes)
        if call.keeps
        else group.outputs.landing(tools.buffer_bytes)
    )
    shape = (sizes.arrivals, sizes.hidden)
    received = space.tensor(shape, call.x.dtype, device)
    # On the CPU backend what no row fills is zero, so that what torch's checks compare is the same
    # twice.
    new = functools.partial(torch.zeros if group.backend == "cpu" else torch.empty, device=device)
    plan, slot_at = new(sizes.plan, dtype=torch.int32), new(sizes.returns, dtype=torch.int32)
    slot_rows = new((sizes.tokens, sizes.top_k), dtype=torch.int32)
    active = new((sizes.arrivals, sizes.ffn), dtype=call.x.dtype)
    kept = new((2, sizes.arrivals, sizes.ffn) if call.keeps else 0, dtype=call.x.dtype)
    grants = new(sizes.world_size, dtype=torch.int32)
    saved = Saved(plan, slot_rows, slot_at, received, kept)
    y = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    blocks = layout.blocks(sizes.slots, _BLOCK_SLOTS)
    histograms = new((blocks, tools.lanes["E_LANES"]), dtype=torch.int32)
    lanes = {"WORLD_SIZE": sizes.world_size, **tools.lanes, "BLOCK": _BLOCK_SLOTS}
    experts = call.experts.contiguous()
    count = Launch(
        kernel.count_slots, (blocks,), (experts, histograms, sizes.slots, sizes.experts),
        {"E_LANES": lanes["E_LANES"], "BLOCK": _BLOCK_SLOTS},
    )  # fmt: skip
    numbers = tools.workspace
    arguments = (
        experts, histograms, slot_rows, slot_at, plan, grants, numbers.data.address,
        numbers.signals.address, numbers.epochs, tools.context, mark, numbers.half_bytes,
        space.index, sizes.slots, sizes.capacity, sizes.experts, sizes.local,
    )  # fmt: skip
    warps = max(
        4, min(32, lanes["E_LANES"] // 16)
    )  # comparisons of slots with experts fit in registers
    agree = Launch(kernel.plan_call, (blocks,), arguments, lanes | {"num_warps": warps})
    first = tools.dispatch(
        call.x, saved, call.w_in, active, space, kept=kept if call.keeps else None, grants=grants
    )
    second = tools.combine(plan, active, call.w_out, transposed=True)
    total = tools.sum(saved, call.weights, y, None)
    return [count, agree, first, second, total], y, saved, space.lent


# The backward pass


def prepare_backward(
    call: Call, mark: int, grad: torch.Tensor, saved: Saved, wanted: Sequence[bool]
) -> tuple[list[Launch], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Its launches in order: dispatch of gradients and product with w_out; activation; product with
    w_in and combine; gradients of the weights, while the peers' results come; sum.
    """
    group, sizes = call.group, call.sizes
    require(group.backend)

    tools = _Tools(call, _BACKWARD, mark)
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
        tools.combine(saved.plan, inner_gradient, call.w_in, met=met, transposed=False),
    ]
    grad_in, grad_out = (
        torch.empty_like(weight, memory_format=torch.contiguous_format)
        if need
        else weight.new_empty(0)
        for weight, need in zip((call.w_in, call.w_out), wanted, strict=True)
    )
    if wanted[0]:
        launches.append(tools.gradient(saved.plan, inner_gradient, saved.received, grad_in))
    if wanted[1]:
        launches.append(tools.gradient(saved.plan, arrived, scaled, grad_out))
    launches.append(tools.sum(saved, None, grad_x, grad_weights))
    return launches, (grad_x, grad_weights, grad_in, grad_out)


def fits_descriptors(call: Call, config: MixtureOfExpertsConfig) -> bool:
    """Whether products load and store by tensor descriptors."""
    sizes, itemsize = call.sizes, call.x.dtype.itemsize
    return (
        config.operands == "tiles"
        and has_descriptors(call.group)
        and all(
            size * itemsize % 16 == 0 and size % config.block_k == 0
            for size in (sizes.hidden, sizes.ffn)
        )
        and all(tensor.data_ptr() % 16 == 0 for tensor in (call.w_in, call.w_out))
    )


class _Tools:
    """Makes the launches of one call: what they have in common is worked out once."""

    def __init__(self, call: Call, operator: str, mark: int) -> None:
        group, sizes = call.group, call.sizes
        self.call, self.group, self.sizes, self.mark = call, group, sizes, mark
        _, self.config = call.chosen
        self.dtype = call.x.dtype
        ranks, experts = sizes.world_size, sizes.experts
        self.workspace = group.workspace(operator, 4 * ranks * (experts + 1), layout.SIGNALS)
        self.context = group.context(operator)
        row_bytes = sizes.hidden * self.dtype.itemsize
        self.scale_bytes = sizes.arrivals * row_bytes
        self.buffer_bytes = self.scale_bytes + 4 * sizes.arrivals
        # Both halves as one: nobody writes here before this rank is in its next call.
        self.results = group.workspace(
            _RESULTS, ceil_div(sizes.returns * (row_bytes + 4), 2)
        ).data.address
        self.gradients = self.results + round_up(sizes.returns * row_bytes, 16)
        self.lanes = {
            "R_LANES": next_power_of_2(ranks),
            "E_LANES": next_power_of_2(max(experts, 2)),
            "L_LANES": next_power_of_2(max(sizes.local, 2)),
        }
        self.align = 16 // self.dtype.itemsize
        while sizes.hidden % self.align:
            self.align //= 2
        cuda = group.backend == "cuda"
        self.programs = min(
            self.config.programs or (processors(call.x.device) if cuda else 2), MAX_PROGRAMS // 2
        )
        self.tiles = fits_descriptors(call, self.config)
        self.shared = {
            "WORLD_SIZE": ranks,
            "DTYPE": triton_dtype(self.dtype),
            "TILES": self.tiles,
            # TensorFloat-32 would lose what float32 callers ask for; the interpreter cannot
            # multiply bfloat16.
            "PRECISION": "ieee" if cuda or self.tiles else "upcast",
            "R_LANES": self.lanes["R_LANES"],
            "L_LANES": self.lanes["L_LANES"],
            "BM": self.config.block_m,
            "BN": self.config.block_n,
            "BK": self.config.block_k,
            "GROUP": self.config.group_m,
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
        }

    def describe(self, tensor: torch.Tensor, width: int, block: list[int]) -> Any:
        """A descriptor of a contiguous tensor as ``[rows, width]``; None where tiles are not used."""
        if not self.tiles:
            return None
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], block)

    def weight_tiles(self, weight: torch.Tensor, columns: int, inner: int, transposed: bool) -> Any:
        block_n, block_k = self.config.block_n, self.config.block_k
        if transposed:
            return self.describe(weight, inner, [block_n, block_k])
        return self.describe(weight, columns, [block_k, block_n])

    def dispatch(
        self,
        x: torch.Tensor,
        saved: Saved,
        weight: torch.Tensor,
        out: torch.Tensor,
        space: Output,
        *,
        kept: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        grants: torch.Tensor | None = None,
        met: torch.Tensor | None = None,
    ) -> Launch:
        """Rows of ``x`` to their experts, into every rank's ``space``, and the product of what
        arrives.

        Args:
            kept: forward, and the backward pass will come: where gate and up go.
            scales: backward: the slots' weights, which go along.
            grants: forward: the numbers of the ranks' buffers. Without them, all ranks' are the
                same, and ranks have yet to meet.
            met: backward: int32 ``[1]``, becomes 1 once they have met.
        """
        from interlace.operators.mixture_of_experts import kernel

        sizes, config, forward = self.sizes, self.config, grants is not None
        columns = 2 * sizes.ffn if forward else sizes.ffn
        width = config.block_n // 2 if forward else config.block_n
        mine = (
            space.address + space.index * space.buffer_bytes + self.group.rank * self.group.stride
        )
        raw = bytes_at(mine, (self.scale_bytes,), (1,), x.device, None)
        arrived = view_as(raw, (sizes.arrivals, sizes.hidden), self.dtype)
        push_rows = max(config.push_rows, next_power_of_2(ceil_div(sizes.tokens, MAX_PROGRAMS)))
        rows, across = layout.push_tile(
            sizes.hidden, self.dtype.itemsize, config.num_warps, push_rows
        )
        x, weight = x.contiguous(), weight.contiguous()
        ticket = torch.zeros(1, dtype=torch.int32, device=x.device)
        arguments = (
            x, saved.slot_at, scales, saved.plan, grants,
            self.describe(arrived, sizes.hidden, [config.block_m, config.block_k]),
            self.weight_tiles(weight, columns, sizes.hidden, forward),
            self.describe(out, sizes.ffn, [config.block_m, width]),
            None if kept is None else self.describe(kept, sizes.ffn, [config.block_m, width]),
            weight.data_ptr(), out.data_ptr(), 0 if kept is None else kept.data_ptr(), ticket, met,
            space.address, self.workspace.signals.address, self.workspace.epochs, self.context,
            self.mark, space.buffer_bytes, self.scale_bytes, space.index, sizes.arrivals,
            sizes.experts, sizes.local, columns, sizes.hidden // self.align,
        )  # fmt: skip
        options = self.shared | {
            "TOP_K": sizes.top_k,
            "PUSHERS": config.push_programs,
            "PUSH_ROWS": push_rows,
            "MEET": not forward,
            "SCALED": scales is not None,
            "ACTIVATE": forward,
            "KEEP": kept is not None,
            "TRANSPOSED": forward,
            "E_LANES": self.lanes["E_LANES"],
            "ALIGN": self.align,
            "ROWS": rows,
            "COLS": across,
        }
        grid = (config.push_programs + self.programs,)
        return Launch(kernel.dispatch_grouped_gemm, grid, arguments, options, (weight, out, kept))

    def combine(
        self,
        plan: torch.Tensor,
        rows: torch.Tensor,
        weight: torch.Tensor,
        *,
        met: torch.Tensor | None = None,
        transposed: bool,
    ) -> Launch:
        """``rows [arrivals, inner]`` times the experts' weights, to where the rows came from;
        ``met`` as for :meth:`dispatch`.
        """
        from interlace.operators.mixture_of_experts import kernel

        sizes, config, inner = self.sizes, self.config, rows.shape[1]
        weight = weight.contiguous()
        arguments = (
            plan, met, self.describe(rows, inner, [config.block_m, config.block_k]),
            self.weight_tiles(weight, sizes.hidden, inner, transposed), self.result_tiles(),
            rows.data_ptr(), weight.data_ptr(), self.results, self.workspace.signals.address,
            self.workspace.epochs, self.context, self.mark, sizes.experts, sizes.local, inner,
            sizes.hidden,
            tile_ns(config.block_m, config.block_n, inner) * config.stagger // 100 if sizes.world_size > 1 else 0,
        )  # fmt: skip
        options = self.shared | {"TRANSPOSED": transposed}
        return Launch(
            kernel.grouped_gemm_combine, (self.programs,), arguments, options, (rows, weight)
        )

    def result_tiles(self) -> Any:
        """A descriptor of every rank's results: ``[rank, row, column]``."""
        if not self.tiles:
            return None
        from triton.tools.tensor_descriptor import TensorDescriptor

        sizes, itemsize = self.sizes, self.dtype.itemsize
        base = view_as(
            bytes_at(self.results, (16,), (1,), self.group.device, None),
            (16 // itemsize,),
            self.dtype,
        )
        # A group of one has no distance between ranks; a descriptor must.
        stride = self.group.stride // itemsize or sizes.returns * sizes.hidden
        shape = [sizes.world_size, sizes.returns, sizes.hidden]
        return TensorDescriptor(
            base, shape, [stride, sizes.hidden, 1], [1, self.config.block_m, self.config.block_n]
        )

    def sum(
        self,
        saved: Saved,
        weights: torch.Tensor | None,
        y: torch.Tensor,
        gradient: torch.Tensor | None,
    ) -> Launch:
        """Wait for the results and add each token's."""
        from interlace.operators.mixture_of_experts import kernel

        sizes = self.sizes
        arguments = (
            saved.slot_rows, weights, saved.plan, y, gradient, self.results, self.gradients,
            self.workspace.signals.address, self.workspace.epochs, self.context, self.mark,
            sizes.tokens, sizes.experts, sizes.hidden // self.align,
        )  # fmt: skip
        options = {
            "WORLD_SIZE": sizes.world_size,
            "TOP_K": sizes.top_k,
            "DTYPE": triton_dtype(self.dtype),
            "R_LANES": self.lanes["R_LANES"],
            "K_LANES": next_power_of_2(sizes.top_k),
            "ALIGN": self.align,
            "COLS": min(next_power_of_2(max(sizes.hidden, 16)), 2048),
            "num_warps": 4,
        }
        return Launch(
            kernel.sum_results, (min(sizes.tokens, self.config.sum_programs),), arguments, options
        )

    def activation(
        self,
        saved: Saved,
        met: torch.Tensor,
        product_gradient: torch.Tensor,
        inner: torch.Tensor,
        scaled: torch.Tensor,
        arrived: torch.Tensor,
    ) -> Launch:
        """Through SwiGLU backwards."""
        from interlace.operators.mixture_of_experts import kernel

        sizes = self.sizes
        rows, columns = layout.activation_tile(sizes.ffn)
        arguments = (
            saved.plan, met, saved.kept.data_ptr(), product_gradient.data_ptr(), inner.data_ptr(),
            scaled.data_ptr(), arrived.data_ptr(), self.gradients, self.context, self.scale_bytes,
            sizes.arrivals, sizes.experts, sizes.local, sizes.ffn,
        )  # fmt: skip
        options = {
            "WORLD_SIZE": sizes.world_size, "DTYPE": triton_dtype(self.dtype),
            "L_LANES": self.lanes["L_LANES"], "ROWS": rows, "COLS": columns, "num_warps": 4,
        }  # fmt: skip
        grid = (self.programs * (8 if self.group.backend == "cuda" else 1),)
        return Launch(
            kernel.swiglu_backward, grid, arguments, options, (product_gradient, inner, scaled)
        )

    def gradient(
        self, plan: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor
    ) -> Launch:
        """Each expert's ``left.T @ right``, into ``out``."""
        from interlace.operators.mixture_of_experts import kernel

        sizes, config = self.sizes, self.config
        wide, narrow = left.shape[1], right.shape[1]
        even = self.tiles and wide % config.block_m == 0
        arguments = (
            plan, self.describe(left, wide, [config.block_k, config.block_m]),
            self.describe(right, narrow, [config.block_k, config.block_n]),
            self.describe(out, narrow, [config.block_m, config.block_n]) if even else None,
            left.data_ptr(), right.data_ptr(), out.data_ptr(), self.group.rank, sizes.experts,
            sizes.local, wide, narrow,
        )  # fmt: skip
        options = {name: value for name, value in self.shared.items() if name != "R_LANES"} | {
            "EVEN": even
        }
        return Launch(
            kernel.grouped_gemm_gradient, (self.programs,), arguments, options, (left, right)
        )


# The unfused way


def _unfused(call: Call) -> torch.Tensor:
    process_group = process_group_named(call.group_name)
    with torch.no_grad():
        return reference.mixture_of_experts(
            call.x, call.experts, call.weights, call.w_in, call.w_out, call.capacity, process_group
        )


def _unfused_gradients(
    call: Call, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """By running the forward pass again: it kept nothing."""
    process_group = process_group_named(call.group_name)
    leaves = [
        tensor.detach().requires_grad_() for tensor in (call.x, call.weights, call.w_in, call.w_out)
    ]
    with torch.enable_grad():
        x, weights, w_in, w_out = leaves
        y = reference.mixture_of_experts(
            x, call.experts, weights, w_in, w_out, call.capacity, process_group
        )
    found = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    x_grad, weights_grad, w_in_grad, w_out_grad = (
        torch.zeros_like(leaf) if each is None else each
        for each, leaf in zip(found, leaves, strict=True)
    )
    return x_grad, weights_grad, w_in_grad, w_out_grad
