"""``impl="fused"``, forward: kernels that send rows as they compute them.

The backward pass, in :mod:`interlace.operators.mixture_of_experts.fused_backward`, has the same
steps between launches of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from interlace.comm import Group, Workspace
from interlace.comm.groups.group import MAX_PROGRAMS
from interlace.comm.groups.outputs import Output
from interlace.comm.launching.kernels import (
    Launch,
    describe_memory,
    describe_ranks,
    processors,
    triton_dtype,
)
from interlace.comm.replay.deferred import DeferredCall, addresses
from interlace.comm.runtime.interpreter import require
from interlace.gemm.launch import has_descriptors, tile_ns
from interlace.operators.mixture_of_experts import layout
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.layout import ExpertSizes
from interlace.units import ceil_div, next_power_of_2, round_up

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import LayerCall, Saved

_RESULTS = f"{OPERATOR}.results"
_BLOCK_SLOTS = 128


def run(call: LayerCall) -> DeferredCall:
    """Return the work whose result is ``y [T, hidden]``, and the tensors that the backward pass
    needs.
    """

    def prepared(*memory: Any) -> Callable[[], None]:
        workspaces(call, OPERATOR)  # what may have to grow

        def enqueue() -> None:
            for launch in prepare(call, Memory(*memory))[0]:
                launch()

        return enqueue

    take = _TakeMemory(call.sizes, call.x.dtype, call.x.device, call.saves, call.new)
    return DeferredCall(
        (OPERATOR, "fused", call.mark, *call.key),
        take,
        prepared,
        take.results,
        where=places_of,
        with_libraries=False,
        temporary_bytes=temporary_bytes(call, call.sizes.arrivals),
    )


class Memory(NamedTuple):
    """The memory of a forward pass that outlives its launches.

    Attributes:
        space: The buffer in which rows for this rank's experts arrive.
        y: ``[T, hidden]``.
        plan, slot_rows, slot_at, received, kept: Those of :class:`Saved`.
    """

    space: Output
    y: torch.Tensor
    plan: torch.Tensor
    slot_rows: torch.Tensor
    slot_at: torch.Tensor
    received: torch.Tensor
    kept: torch.Tensor

    @property
    def saved(self) -> Saved:
        """Return the tensors that the backward pass needs."""
        from interlace.operators.mixture_of_experts.call import Saved

        return Saved(*self[2:])


@dataclasses.dataclass(frozen=True)
class _TakeMemory:
    """Take the memory of a forward pass, and make its results of it.

    Attributes:
        sizes: The call's sizes.
        dtype, device: Those of its tokens.
        saves: Whether tensors for the backward pass are results.
        new: Makes new tensors of the call.
    """

    sizes: ExpertSizes
    dtype: torch.dtype
    device: torch.device
    saves: bool
    new: Callable[..., torch.Tensor]

    def __call__(self, group: Group) -> Memory:
        """Return new memory, not filled."""
        sizes, new = self.sizes, functools.partial(self.new, device=self.device)
        # Rows that the backward pass needs arrive in a buffer that stays in use until then.
        reserve = group.outputs.take if self.saves else group.outputs.landing
        space = reserve(buffer_bytes(sizes, self.dtype))
        kept = (sizes.gates, sizes.arrivals, sizes.ffn) if self.saves else 0
        return Memory(
            space,
            torch.empty((sizes.tokens, sizes.hidden), dtype=self.dtype, device=self.device),
            plan=new(sizes.plan, dtype=torch.int32),
            slot_rows=new((sizes.tokens, sizes.top_k), dtype=torch.int32),
            slot_at=new(sizes.returns, dtype=torch.int32),
            received=space.tensor((sizes.arrivals, sizes.hidden), self.dtype, self.device),
            kept=new(kept, dtype=self.dtype),
        )

    def results(self, *memory: Any) -> tuple[torch.Tensor, Saved]:
        """Return the results in a call's memory."""
        from interlace.operators.mixture_of_experts.call import Saved

        taken = Memory(*memory)
        if not self.saves:
            return taken.y, Saved.empty(self.sizes, taken.y, saves=False, new=self.new)
        # The landing is written again by the next call, so its rows cannot be kept for the backward
        # pass, but must be copied.
        received = taken.received if taken.space.lent else taken.received.clone()
        return taken.y, taken.saved._replace(received=received)


def places_of(space: Output, *tensors: torch.Tensor) -> Hashable:
    """Return what the work of a pass depends on of the memory that it has taken."""
    return space.destination, addresses(*tensors)


def prepare(
    call: LayerCall, memory: Memory | None = None
) -> tuple[list[Launch], torch.Tensor, Saved, bool]:
    """Prepare the launches of the forward pass, in order. Collective when memory must grow.

    They are: count, plan, dispatch and first product, second product and combine, sum.

    Args:
        call: The call.
        memory: Its memory; new by default.

    Returns:
        The launches, y, the tensors for the backward pass, and whether ``received`` may be kept or
        must be copied at once.
    """
    sizes = call.sizes
    require(call.group.backend)
    steps = Steps(call, OPERATOR)
    if memory is None:
        take = _TakeMemory(sizes, call.x.dtype, call.x.device, call.saves, call.new)
        memory = take(call.group)
    space, y, saved = memory.space, memory.y, memory.saved
    new = functools.partial(call.new, device=call.x.device)
    active = new((sizes.arrivals, sizes.ffn), dtype=call.x.dtype)
    grants = new(sizes.world_size, dtype=torch.int32)
    launches = [
        *steps.plan(saved, grants, space),
        steps.dispatch(saved, active, grants, space),
        steps.combine(saved.plan, active),
        steps.sum(saved, call.weights, y, None),
    ]
    return launches, y, saved, space.lent


def temporary_bytes(call: LayerCall, rows: int, width: int = 1) -> int:
    """Return the bytes that a pass takes for itself: rows of its experts, and copies of weights
    that kernels cannot read where they are.

    Args:
        call: The call.
        rows: The rows.
        width: Their width, as a multiple of the experts' inner one.
    """
    copies = [weight.nbytes for weight in (call.w_in, call.w_out) if not layout.is_readable(weight)]
    return rows * width * call.sizes.ffn * call.x.dtype.itemsize + sum(copies)


def buffer_bytes(sizes: ExpertSizes, dtype: torch.dtype) -> int:
    """Return the bytes of a buffer in which rows for a rank's experts arrive, with their scales."""
    return sizes.arrivals * (sizes.hidden * dtype.itemsize + 4)


def workspaces(call: LayerCall, operator: str) -> tuple[Workspace, Workspace]:
    """Return the memory of a pass for numbers and signals, and for the rows that come back.
    Collective when it must grow.

    Args:
        call: The call.
        operator: The name of the pass.
    """
    group, sizes = call.group, call.sizes
    numbers = 4 * sizes.world_size * (sizes.experts + 1)
    # The workspace's two halves are used as one: peers write here only once this rank is in its
    # next call.
    row_bytes = sizes.hidden * call.x.dtype.itemsize
    results = group.workspace(_RESULTS, ceil_div(sizes.returns * (row_bytes + 4), 2))
    return group.workspace(operator, numbers, layout.SIGNALS), results


def fits_descriptors(call: LayerCall, config: MixtureOfExpertsConfig) -> bool:
    """Decide whether products load and store by tensor descriptors."""
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


class Steps:
    """The launches of one call; their common arguments are computed once.

    Attributes:
        w_in, w_out: The weights as they lie in memory; see ``layout.in_memory_order``.
        in_order, out_order: Their order.
        b_in, b_out: The biases, that of gate and up in the order of w_in's lines; or None.
        tiles: Whether operands and results are tensor descriptors.
        align: The elements, a power of two, that rows are a multiple of.
        results, gradients: Addresses of the rows that come back, and of their slots' gradients.
        scale_bytes, buffer_bytes: Bytes of a buffer's rows, and of the buffer with its scales.
    """

    def __init__(self, call: LayerCall, operator: str) -> None:
        from interlace.gemm.kernels.tiles import Tiling
        from interlace.operators.mixture_of_experts.kernels.plan import ExpertLanes

        group, sizes = call.group, call.sizes
        self.call, self.group, self.sizes, self.mark = call, group, sizes, call.mark
        _, self.config = call.chosen
        self.dtype = call.x.dtype
        self.w_in, self.in_order = layout.in_memory_order(call.w_in)
        self.w_out, self.out_order = layout.in_memory_order(call.w_out)
        self.b_in = None
        if call.b_in is not None:
            self.b_in = layout.bias_in_order(call.b_in, self.in_order)
        self.b_out = None if call.b_out is None else call.b_out.contiguous()
        ranks, experts = sizes.world_size, sizes.experts
        self.workspace, results = workspaces(call, operator)
        self.context = group.context(operator)
        row_bytes = sizes.hidden * self.dtype.itemsize
        self.scale_bytes = sizes.arrivals * row_bytes
        self.buffer_bytes = buffer_bytes(sizes, self.dtype)
        self.results = results.data.address
        self.gradients = self.results + round_up(sizes.returns * row_bytes, 16)
        self.local_lanes = next_power_of_2(max(sizes.local, 2))
        self.lanes = ExpertLanes(ranks, next_power_of_2(max(experts, 2)), self.local_lanes)
        self.align = layout.alignment(sizes.hidden, self.dtype.itemsize)
        cuda = group.backend == "cuda"
        self.programs = min(
            self.config.programs or (processors(call.x.device) if cuda else 2), MAX_PROGRAMS // 2
        )
        self.tiles = fits_descriptors(call, self.config)
        self.tiling = Tiling(
            block_m=self.config.block_m,
            block_n=self.config.block_n,
            block_k=self.config.block_k,
            group_m=self.config.group_m,
            descriptors=self.tiles,
            w_along_k=True,
        )
        self.constants = {
            "WORLD_SIZE": ranks,
            "DTYPE": triton_dtype(self.dtype),
            "TILING": self.tiling,
            "L_LANES": self.local_lanes,
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
        }

    def operand(self, tensor: torch.Tensor, width: int, block: tuple[int, int]) -> Any:
        """Describe a contiguous tensor as ``[rows, width]``; without tiles, return its address.

        The caller keeps the tensor alive until the launch.
        """
        return self._matrix(tensor.data_ptr(), tensor.numel() // width, width, block)

    def _matrix(self, address: int, rows: int, width: int, block: tuple[int, int]) -> Any:
        if not self.tiles:
            return address
        sizes = (rows, width), (width, 1)
        return describe_memory(address, self.group.device, self.dtype, sizes, block)

    def weight(
        self, weight: torch.Tensor, columns: int, inner: int, along_k: bool, halves: bool = False
    ) -> Any:
        """Describe the experts' weights: ``[columns, inner]`` each if ``along_k``, or else
        ``[inner, columns]``.

        With ``halves``, a tile of gates and one of ups are loaded, each with half of the columns.
        """
        block_n, block_k = self.config.block_n // (2 if halves else 1), self.config.block_k
        if along_k:
            return self.operand(weight, inner, (block_n, block_k))
        return self.operand(weight, columns, (block_k, block_n))

    def plan(self, saved: Saved, grants: torch.Tensor, space: Output) -> tuple[Launch, Launch]:
        """Count the rows for each expert, and agree with all ranks on their places.

        Args:
            saved: Its ``plan``, ``slot_rows`` and ``slot_at`` are written.
            grants: int32 ``[ranks]``; becomes the index of the buffer that each rank grants.
            space: The buffer that this rank grants.
        """
        from interlace.operators.mixture_of_experts.kernels.plan import count_slots, plan_call

        sizes, numbers = self.sizes, self.workspace
        blocks, lanes = layout.blocks(sizes.slots, _BLOCK_SLOTS), self.lanes.experts
        # Counting per block lets every block number its slots without waiting for the blocks before
        # it.
        histograms = self.call.new((blocks, lanes), dtype=torch.int32, device=self.call.x.device)
        shared = {
            "experts": self.call.experts.contiguous(),
            "histograms": histograms,
            "slots": sizes.slots,
            "E": sizes.experts,
        }
        constants = {"E_LANES": lanes, "BLOCK": _BLOCK_SLOTS}
        count = Launch(count_slots, (blocks,), shared, constants)
        arguments = {
            **shared,
            "slot_rows": saved.slot_rows,
            "slot_at": saved.slot_at,
            "plan": saved.plan,
            "grants": grants,
            "numbers": numbers.data.address,
            "signals": numbers.signals.address,
            "epochs": numbers.epochs,
            "ctx": self.context,
            "call": self.mark,
            "half": numbers.half_bytes,
            "buffer_index": space.index,
            "capacity": sizes.capacity,
            "L": sizes.local,
        }
        # With so many warps, the comparisons of slots with experts fit in registers.
        warps = max(4, min(32, lanes // 16))
        constants = {"LANES": self.lanes, "BLOCK": _BLOCK_SLOTS, "num_warps": warps}
        return count, Launch(plan_call, (blocks,), arguments, constants)

    def dispatch(
        self, saved: Saved, active: torch.Tensor, grants: torch.Tensor, space: Output
    ) -> Launch:
        """Send tokens to their experts, and compute ``active [arrivals, F]`` of those that arrive.

        Args:
            saved: Gate and up are stored in its ``kept`` if the call saves tensors.
            active: The activation of gate and up.
            grants: The indices of the ranks' buffers.
            space: The buffers of all ranks that rows arrive in.
        """
        from interlace.operators.mixture_of_experts.kernels.dispatch import dispatch_grouped_gemm

        sizes, config = self.sizes, self.config
        kept = saved.kept if self.call.saves else None
        columns = sizes.gates * sizes.ffn
        along_k, halves = self.in_order
        block = config.block_m, config.block_n // sizes.gates
        arguments = {
            **self.pushing_arguments(saved, space),
            "x": self.call.x.contiguous(),
            "grants": grants,
            "b": self.weight(self.w_in, columns, sizes.hidden, along_k, halves),
            "bias": self.b_in,
            "out": self.operand(active, sizes.ffn, block),
            "kept": None if kept is None else self.operand(kept, sizes.ffn, block),
            "buffers": space.address,
            "buffer_bytes": space.buffer_bytes,
            "arrivals": sizes.arrivals,
            "columns": columns,
        }
        constants = self.pushing_constants(along_k) | {"FORM": self.call.form}
        grid, keep = (config.push_programs + self.programs,), (self.w_in, active, kept)
        return Launch(dispatch_grouped_gemm, grid, arguments, constants, keep)

    def pushing_arguments(self, saved: Saved, space: Output) -> dict[str, Any]:
        """Return the arguments that both directions' kernels take which push rows."""
        sizes, config = self.sizes, self.config
        own = self._matrix(
            space.address + space.index * space.buffer_bytes + self.group.rank * self.group.stride,
            sizes.arrivals,
            sizes.hidden,
            (config.block_m, config.block_k),
        )
        return {
            "slot_at": saved.slot_at,
            "plan": saved.plan,
            # The product reads arriving rows from this rank's own buffer, which peers write.
            "a": own,
            # Programs take tickets for tiles, because experts get different numbers of rows.
            "ticket": torch.zeros(1, dtype=torch.int32, device=self.call.x.device),
            "signals": self.workspace.signals.address,
            "epochs": self.workspace.epochs,
            "ctx": self.context,
            "call": self.mark,
            "L": sizes.local,
            "hidden_groups": sizes.hidden // self.align,
        }

    def pushing_constants(self, along_k: bool) -> dict[str, Any]:
        """Return the constants that both directions' kernels take which push rows.

        Args:
            along_k: Whether the weight is contiguous along the product's inner dimension.
        """
        from interlace.operators.mixture_of_experts.kernels.dispatch import RowPushing

        sizes, config = self.sizes, self.config
        push_rows = max(config.push_rows, next_power_of_2(ceil_div(sizes.tokens, MAX_PROGRAMS)))
        rows, columns = layout.push_tile(
            sizes.hidden, self.dtype.itemsize, config.num_warps, push_rows
        )
        return {
            "LANES": self.lanes,
            "PUSHING": RowPushing(
                config.push_programs, push_rows, rows, columns, sizes.top_k, self.align
            ),
            "TILING": self.tiling._replace(w_along_k=along_k),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }

    def combine(
        self, plan: torch.Tensor, rows: torch.Tensor, *, met: torch.Tensor | None = None
    ) -> Launch:
        """Multiply ``rows [arrivals, inner]`` by the experts' weights and send the results back.

        Forward, the weight is w_out; backward, where there is ``met`` as for :meth:`dispatch`, it
        is w_in.
        """
        from interlace.operators.mixture_of_experts.kernels.combine import grouped_gemm_combine

        sizes, config, inner = self.sizes, self.config, rows.shape[1]
        if met is None:
            weight, along_k = self.w_out, self.out_order.along_k
        else:
            weight, along_k = self.w_in, not self.in_order.along_k
        # Programs begin one after another, so that results leave steadily and not in bursts.
        spread_ns = 0
        if sizes.world_size > 1:
            spread_ns = tile_ns(config.block_m, config.block_n, inner) * config.stagger // 100
        arguments = {
            "plan": plan,
            "met": met,
            "a": self.operand(rows, inner, (config.block_m, config.block_k)),
            "b": self.weight(weight, sizes.hidden, inner, along_k),
            "bias": self.b_out if met is None else None,
            "results": self.result_tiles() if self.tiles else self.results,
            "signals": self.workspace.signals.address,
            "epochs": self.workspace.epochs,
            "ctx": self.context,
            "call": self.mark,
            "E": sizes.experts,
            "L": sizes.local,
            "inner": inner,
            "columns": sizes.hidden,
            "spread_ns": spread_ns,
        }
        tiling = self.tiling._replace(w_along_k=along_k)
        constants = self.constants | {"TILING": tiling}
        return Launch(grouped_gemm_combine, (self.programs,), arguments, constants, (rows, weight))

    def result_tiles(self) -> Any:
        """Describe every rank's results: ``[rank, row, column]``."""
        sizes, config = self.sizes, self.config
        inner = (sizes.returns, sizes.hidden), (sizes.hidden, 1)
        block = [config.block_m, config.block_n]
        return describe_ranks(self.group, self.results, self.dtype, inner, block)

    def sum(
        self,
        saved: Saved,
        weights: torch.Tensor | None,
        y: torch.Tensor,
        gradient: torch.Tensor | None,
    ) -> Launch:
        """Wait for the results and add up those of each token."""
        from interlace.operators.mixture_of_experts.kernels.combine import sum_results

        sizes = self.sizes
        arguments = {
            "slot_rows": saved.slot_rows,
            "weights": weights,
            "plan": saved.plan,
            "y": y,
            "gradient": gradient,
            "results": self.results,
            "gradients": self.gradients,
            "signals": self.workspace.signals.address,
            "epochs": self.workspace.epochs,
            "ctx": self.context,
            "call": self.mark,
            "tokens": sizes.tokens,
            "E": sizes.experts,
            "hidden_groups": sizes.hidden // self.align,
        }
        constants = {
            "WORLD_SIZE": sizes.world_size,
            "TOP_K": sizes.top_k,
            "DTYPE": triton_dtype(self.dtype),
            "ALIGN": self.align,
            "COLS": min(next_power_of_2(max(sizes.hidden, 16)), 2048),
            "num_warps": 4,
        }
        programs = min(sizes.tokens, self.config.sum_programs)
        return Launch(sum_results, (programs,), arguments, constants)
