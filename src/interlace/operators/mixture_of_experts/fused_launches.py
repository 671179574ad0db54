"""The launches of ``impl="fused"``, forward and backward.

This module imports Triton, so it is imported by the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.groups.group import MAX_PROGRAMS
from interlace.comm.groups.outputs import Output
from interlace.comm.launching.kernels import (
    Launch,
    describe_memory,
    describe_ranks,
    processors,
    triton_dtype,
)
from interlace.gemm.kernels.tiles import Tiling
from interlace.gemm.launch import moves_tiles, tile_ns
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.operators.mixture_of_experts import layout
from interlace.operators.mixture_of_experts.call import BACKWARD, LayerCall
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.operators.mixture_of_experts.decode import quantising, resident_programs
from interlace.operators.mixture_of_experts.fused import workspaces
from interlace.operators.mixture_of_experts.kernels import combine, dispatch, gradients, plan
from interlace.operators.mixture_of_experts.layout import Saved
from interlace.units import alignment, ceil_div, next_power_of_2, round_up

_Rows = tuple[torch.Tensor, torch.Tensor | None]
"""Rows, and of float8 ones the scales of their blocks, ``[rows, width / 128]``."""

_BLOCK_SLOTS = 128

# A program adds tiles of so many numbers, 16 of them per thread.
_BIAS_ROWS = 16
_BIAS_COLUMNS = 128


def forward_launches(
    call: LayerCall, space: Output, y: torch.Tensor, *saved: torch.Tensor
) -> list[Launch]:
    """Return the launches of the forward pass, in order. Collective when memory must grow.

    They are: tokens as float8, if weights are; count, plan, dispatch and first product, second
    product and combine, sum.

    Args:
        call: The call.
        space, y, saved: Its memory; see :func:`fused.forward_memory`.
    """
    sizes = call.sizes
    kept = Saved(*saved or (*layout.numbers(sizes, y.device, call.new), *Saved.nothing(y)[3:]))
    steps = Steps(call, OPERATOR)
    active = call.new((sizes.arrivals, sizes.ffn), dtype=call.w_in.dtype, device=call.x.device)
    tokens, token_scale, active_scale = call.x.contiguous(), None, None
    first = []
    if call.is_float8:
        # A token goes to several experts, so it becomes float8 before rows are sent.
        wide, tokens = tokens, tokens.new_empty(tokens.shape, dtype=call.w_in.dtype)
        token_scale, active_scale = (
            wide.new_empty((rows, width // SCALE_BLOCK), dtype=torch.float32)
            for rows, width in (wide.shape, active.shape)
        )
        first = [quantising(wide, tokens, token_scale)]
        tokens = tokens.view(torch.int32)
    grants = call.new(sizes.world_size, dtype=torch.int32, device=call.x.device)
    return [
        *first,
        *steps.plan(kept, grants, space),
        steps.dispatch(kept, (tokens, token_scale), (active, active_scale), grants, space),
        steps.combine(kept.plan, active, active_scale),
        steps.sum(kept, call.weights, y, None),
    ]


def backward_launches(
    call: LayerCall,
    grad: torch.Tensor,
    saved: Saved,
    needed: Sequence[bool],
    space: Output,
    grad_x: torch.Tensor,
    grad_weights: torch.Tensor,
    *grads: torch.Tensor,
) -> list[Launch]:
    """Return the launches of the backward pass, in order. Collective when memory must grow.

    They are: dispatch of gradients and product with w_out; activation; product with w_in and
    combine; gradients of the weights and biases, while the peers' results arrive; sum.

    Args:
        call: The call.
        grad: The gradient of y.
        saved: The tensors of the forward pass.
        needed: Which parameters' gradients are needed.
        space, grad_x, grad_weights, grads: Its memory; see :func:`fused.backward_memory`.
    """
    sizes = call.sizes
    steps = Steps(call, BACKWARD)
    like, rows = call.x, sizes.arrivals
    product_gradient, scaled = like.new_empty(rows, sizes.ffn), like.new_empty(rows, sizes.ffn)
    inner_gradient = like.new_empty(rows, sizes.gates * sizes.ffn)
    factors = None if call.b_out is None else like.new_empty(rows, dtype=torch.float32)
    met = torch.empty(1, dtype=torch.int32, device=like.device)
    arrived = space.tensor((rows, sizes.hidden), like.dtype, like.device)
    launches = [
        steps.dispatch_backward(grad, saved, product_gradient, met, space),
        steps.activation(saved, met, product_gradient, inner_gradient, scaled, arrived, factors),
        steps.combine(saved.plan, inner_gradient, met=met),
    ]
    grad_in, grad_out, grad_b_in, grad_b_out = grads
    # The columns of a weight's gradient in memory are those of the second operand.
    for gradient, is_needed, order, pair in (
        (grad_in, needed[0], steps.weights.in_order, (inner_gradient, saved.received)),
        (grad_out, needed[1], steps.weights.out_order, (arrived, scaled)),
    ):
        if is_needed:
            left, right = pair if order.along_k else pair[::-1]
            launches.append(steps.gradient(saved.plan, left, right, gradient))
    if grad_b_in.numel():
        launches.append(steps.bias_gradient(saved.plan, inner_gradient, None, grad_b_in))
    if grad_b_out.numel():
        launches.append(steps.bias_gradient(saved.plan, arrived, factors, grad_b_out))
    launches.append(steps.sum(saved, None, grad_x, grad_weights))
    return launches


class Steps:
    """The launches of one call; their common arguments are computed once.

    Attributes:
        weights: The experts' parameters as they lie in memory.
        scales: Those of float8 weights, or None.
        tiles: Whether operands and results are tensor descriptors.
        align: The elements, a power of two, that rows are a multiple of.
        results, gradients: Addresses of the rows that come back, and of their slots' gradients.
        scale_bytes: Bytes of a buffer's rows, in front of their scales.
        operand_dtype: The dtype of what is multiplied: float8, or that of x.
    """

    def __init__(self, call: LayerCall, operator: str) -> None:
        group, sizes = call.group, call.sizes
        self.call, self.group, self.sizes, self.mark = call, group, sizes, call.mark
        _, self.config = call.chosen
        self.dtype, self.weights = call.x.dtype, call.parameters.readable()
        self.scales = call.weight_scales
        ranks, experts = sizes.world_size, sizes.experts
        self.workspace, results = workspaces(call, operator)
        self.context = group.context(operator)
        # The dtype of what is multiplied; results have that of x.
        self.operand_dtype = call.w_in.dtype
        row_bytes = sizes.hidden * self.dtype.itemsize
        self.scale_bytes = sizes.arrivals * sizes.hidden * self.operand_dtype.itemsize
        self.results = results.data.address
        self.gradients = self.results + round_up(sizes.returns * row_bytes, 16)
        self.local_lanes = next_power_of_2(max(sizes.local, 2))
        self.lanes = plan.ExpertLanes(ranks, next_power_of_2(max(experts, 2)), self.local_lanes)
        self.align = alignment(self.dtype.itemsize, sizes.hidden)
        self.programs = min(self.config.programs or self._most_programs(), MAX_PROGRAMS // 2)
        self.tiles = self._fits_descriptors()
        self.tiling = Tiling(
            block_m=self.config.block_m,
            block_n=self.config.block_n,
            block_k=self.config.block_k,
            group_m=self.config.group_m,
            descriptors=self.tiles,
            w_along_k=True,
            block_scales="x" if call.is_float8 else "",
        )
        self.constants = {
            "WORLD_SIZE": ranks,
            "DTYPE": triton_dtype(self.dtype),
            "TILING": self.tiling,
            "L_LANES": self.local_lanes,
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
        }

    def _most_programs(self) -> int:
        """Return the programs that compute if the configuration does not say how many."""
        if self.group.backend == "cpu":
            return 2
        if self.call.is_float8:
            # While one scales what a step adds, others multiply.
            return resident_programs(self.config, self.operand_dtype.itemsize, self.call.x.device)
        return processors(self.call.x.device)

    def _fits_descriptors(self) -> bool:
        """Decide whether products load and store by tensor descriptors."""
        return moves_tiles(self.group.device) and all(
            size * self.operand_dtype.itemsize % 16 == 0 and size % self.config.block_k == 0
            for size in (self.sizes.hidden, self.sizes.ffn)
        )

    def operand(self, tensor: torch.Tensor, width: int, block: tuple[int, int]) -> Any:
        """Describe a contiguous tensor as ``[rows, width]``; without tiles, return its address.

        The caller keeps the tensor alive until the launch.
        """
        return self._matrix(tensor.data_ptr(), tensor.numel() // width, width, block)

    def _matrix(self, address: int, rows: int, width: int, block: tuple[int, int]) -> Any:
        if not self.tiles:
            return address
        sizes = (rows, width), (width, 1)
        return describe_memory(address, self.group.device, self.operand_dtype, sizes, block)

    def weight(
        self, weight: torch.Tensor, columns: int, inner: int, along_k: bool, halves: bool = False
    ) -> Any:
        """Describe the experts' weights: ``[columns, inner]`` each if ``along_k``, or else
        ``[inner, columns]``.

        With ``halves``, a tile of gates and one of ups are loaded, each with half of the columns:
        of float8 at once.
        """
        block_n, block_k = self.config.block_n // (2 if halves else 1), self.config.block_k
        if halves and self.tiles and self.call.is_float8:
            width = columns // 2
            sizes = (2 * self.sizes.local, width * inner), (width, inner), (inner, 1)
            block = 2, block_n, block_k
            device, dtype = self.group.device, self.operand_dtype
            return describe_memory(weight.data_ptr(), device, dtype, sizes, block)
        if along_k:
            return self.operand(weight, inner, (block_n, block_k))
        return self.operand(weight, columns, (block_k, block_n))

    def plan(self, saved: Saved, grants: torch.Tensor, space: Output) -> list[Launch]:
        """Count the rows for each expert, and agree with all ranks on their places.

        Args:
            saved: Its ``plan``, ``slot_rows`` and ``slot_at`` are written.
            grants: int32 ``[ranks]``; becomes the index of the buffer that each rank grants.
            space: The buffer that this rank grants.
        """
        sizes, numbers = self.sizes, self.workspace
        blocks, lanes = max(1, ceil_div(sizes.slots, _BLOCK_SLOTS)), self.lanes.experts
        # Counting per block lets every block number its slots without waiting for the blocks before
        # it.
        histograms = self.call.new(
            (blocks + 1, lanes), dtype=torch.int32, device=self.call.x.device
        )
        shared = {
            "experts": self.call.experts.contiguous(),
            "histograms": histograms,
            "slots": sizes.slots,
            "E": sizes.experts,
        }
        constants = {"E_LANES": lanes, "BLOCK": _BLOCK_SLOTS}
        launches = [Launch(plan.count_slots, (blocks,), shared, constants)]
        is_numbered = blocks > layout.FEW_BLOCKS
        if is_numbered:
            launches.append(
                Launch(
                    plan.number_blocks,
                    (lanes,),
                    {"histograms": histograms, "blocks": blocks},
                    {"E_LANES": lanes, "BLOCKS": next_power_of_2(blocks + 1)},
                )
            )
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
            "buffer_index": space.destination.own_index,
            "capacity": sizes.capacity,
            "L": sizes.local,
        }
        # With so many warps, the comparisons of slots with experts fit in registers.
        warps = max(4, min(32, lanes // 16))
        constants = {
            "LANES": self.lanes,
            "BLOCK": _BLOCK_SLOTS,
            "NUMBERED": is_numbered,
            "num_warps": warps,
        }
        launches.append(Launch(plan.plan_call, (blocks,), arguments, constants))
        return launches

    def dispatch(
        self,
        saved: Saved,
        tokens: _Rows,
        activation: _Rows,
        grants: torch.Tensor,
        space: Output,
    ) -> Launch:
        """Send tokens to their experts, and compute the activation of gate and up of those that
        arrive.

        Args:
            saved: Gate and up are stored in its ``kept`` if the call saves tensors.
            tokens: ``[T, hidden]``, or float8 ones in words of four.
            activation: ``[arrivals, F]``.
            grants: The indices of the ranks' buffers.
            space: The buffers of all ranks that rows arrive in.
        """
        sizes, config = self.sizes, self.config
        kept = saved.kept if self.call.saves else None
        columns = sizes.gates * sizes.ffn
        along_k, halves = self.weights.in_order
        block = config.block_m, config.block_n // sizes.gates
        (x, x_scale), (active, active_scale) = tokens, activation
        place, scale_bytes = space.destination, None if self.scales is None else self.scale_bytes
        rows = dispatch.LeavingRows(
            x=x,
            slot_at=saved.slot_at,
            scales=None,
            block_scales=x_scale,
            buffers=place.address,
            nbytes=place.buffer_bytes,
            grants=grants,
            scale_bytes=scale_bytes,
        )
        arguments = {
            **self.pushing_arguments(saved, space),
            "rows": rows,
            "b": self.weight(self.weights.w_in, columns, sizes.hidden, along_k, halves),
            "scales": None,
            "bias": self.weights.b_in,
            "out": self.operand(active, sizes.ffn, block),
            "kept": None if kept is None else self.operand(kept, sizes.ffn, block),
            "arrivals": sizes.arrivals,
            "columns": columns,
        }
        keep = self.weights.w_in, active, active_scale, kept
        if self.scales is not None:
            address = space.local_address + self.scale_bytes
            arguments |= {
                "scales": dispatch.BlockScales(address, self.scales.of_in, active_scale),
                "out": active.data_ptr(),
            }
        constants = self.pushing_constants(along_k)
        constants |= {"FORM": self.call.form, "DTYPE": triton_dtype(self.dtype)}
        grid = (config.push_programs + self.programs,)
        return Launch(dispatch.dispatch_grouped_gemm, grid, arguments, constants, keep)

    def pushing_arguments(self, saved: Saved, space: Output) -> dict[str, Any]:
        """Return the arguments that both directions' kernels take which push rows."""
        sizes, config = self.sizes, self.config
        own = self._matrix(
            space.local_address, sizes.arrivals, sizes.hidden, (config.block_m, config.block_k)
        )
        return {
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
        sizes, config = self.sizes, self.config
        push_rows = max(config.push_rows, next_power_of_2(ceil_div(sizes.tokens, MAX_PROGRAMS)))
        # Float8 rows leave in words of four numbers.
        width, itemsize = sizes.hidden, self.dtype.itemsize
        if self.call.is_float8:
            width, itemsize = width // 4, 4
        rows, columns = layout.push_tile(width, itemsize, config.num_warps, push_rows)
        return {
            "LANES": self.lanes,
            "PUSHING": dispatch.RowPushing(
                config.push_programs,
                push_rows,
                rows,
                columns,
                sizes.top_k,
                self.align,
            ),
            "TILING": self.tiling._replace(w_along_k=along_k),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }

    def combine(
        self,
        plan: torch.Tensor,
        rows: torch.Tensor,
        row_scales: torch.Tensor | None = None,
        *,
        met: torch.Tensor | None = None,
    ) -> Launch:
        """Multiply ``rows [arrivals, inner]`` by the experts' weights and send the results back.

        Forward, the weight is w_out; backward, where there is ``met`` as for :meth:`dispatch`, it
        is w_in. ``row_scales [arrivals, inner / 128]`` are those of float8 rows.
        """
        sizes, config, inner = self.sizes, self.config, rows.shape[1]
        if met is None:
            weight, along_k = self.weights.w_out, self.weights.out_order.along_k
        else:
            weight, along_k = self.weights.w_in, not self.weights.in_order.along_k
        # Programs begin one after another, so that results leave steadily and not in bursts.
        spread_ns = 0
        if sizes.world_size > 1:
            spread_ns = tile_ns(config.block_m, config.block_n, inner) * config.stagger // 100
        results: Any = self.results
        if self.tiles:
            # Those of every rank: ``[rank, row, column]``.
            of_rank = (sizes.returns, sizes.hidden), (sizes.hidden, 1)
            block = [config.block_m, config.block_n]
            results = describe_ranks(self.group, self.results, self.dtype, of_rank, block)
        arguments = {
            "plan": plan,
            "met": met,
            "a": self.operand(rows, inner, (config.block_m, config.block_k)),
            "b": self.weight(weight, sizes.hidden, inner, along_k),
            "a_scale": row_scales,
            "b_scale": None if self.scales is None else self.scales.of_out,
            "bias": self.weights.b_out if met is None else None,
            "results": results,
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
        grid, keep = (self.programs,), (rows, row_scales, weight)
        return Launch(combine.grouped_gemm_combine, grid, arguments, constants, keep)

    def sum(
        self,
        saved: Saved,
        weights: torch.Tensor | None,
        y: torch.Tensor,
        gradient: torch.Tensor | None,
    ) -> Launch:
        """Wait for the results and add up those of each token."""
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
        return Launch(combine.sum_results, (programs,), arguments, constants)

    # Backward

    def dispatch_backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        product_gradient: torch.Tensor,
        met: torch.Tensor,
        space: Output,
    ) -> Launch:
        """Send gradients of y to the experts, and multiply those that arrive by w_out.

        Args:
            grad: The gradient of y; the slots' weights travel with its rows.
            saved: The plan, and the slot of each row.
            product_gradient: ``[arrivals, F]``, the products.
            met: int32 ``[1]``, which becomes 1 once ranks have met.
            space: The landing, whose index is the same on all ranks.
        """
        sizes, config = self.sizes, self.config
        along_k = not self.weights.out_order.along_k
        block = config.block_m, config.block_n
        rows = dispatch.LeavingRows(
            x=grad.contiguous(),
            slot_at=saved.slot_at,
            scales=self.call.weights,
            block_scales=None,
            buffers=space.destination.own_address,
            nbytes=None,
            grants=None,
            scale_bytes=self.scale_bytes,
        )
        arguments = {
            **self.pushing_arguments(saved, space),
            "rows": rows,
            "b": self.weight(self.weights.w_out, sizes.ffn, sizes.hidden, along_k),
            "out": self.operand(product_gradient, sizes.ffn, block),
            "met": met,
            "columns": sizes.ffn,
        }
        grid, constants = (config.push_programs + self.programs,), self.pushing_constants(along_k)
        keep = (self.weights.w_out, product_gradient)
        return Launch(dispatch.dispatch_grouped_gemm_backward, grid, arguments, constants, keep)

    def activation(
        self,
        saved: Saved,
        met: torch.Tensor,
        product_gradient: torch.Tensor,
        inner: torch.Tensor,
        scaled: torch.Tensor,
        arrived: torch.Tensor,
        factors: torch.Tensor | None,
    ) -> Launch:
        """Compute the gradients of gate and up, and of the slots' weights.

        Args:
            factors: float32 ``[arrivals]``, for :meth:`bias_gradient`, if there is b_out.
        """
        sizes = self.sizes
        rows, columns = layout.activation_tile(sizes.ffn)
        arguments = {
            "plan": saved.plan,
            "met": met,
            "kept": saved.kept.data_ptr(),
            "product_gradient": product_gradient.data_ptr(),
            "inner_gradient": inner.data_ptr(),
            "scaled": scaled.data_ptr(),
            "received": arrived.data_ptr(),
            "bias": self.weights.b_out,
            "factors": factors,
            "gradients": self.gradients,
            "ctx": self.context,
            "scale_bytes": self.scale_bytes,
            "arrivals": sizes.arrivals,
            "E": sizes.experts,
            "L": sizes.local,
            "width": sizes.ffn,
            "hidden": sizes.hidden,
        }
        constants = {
            "WORLD_SIZE": sizes.world_size,
            "DTYPE": triton_dtype(self.dtype),
            "L_LANES": self.local_lanes,
            "FORM": self.call.form,
            "ROWS": rows,
            "COLS": columns,
            "num_warps": 4,
        }
        grid = (self.programs * (8 if self.group.backend == "cuda" else 1),)
        keep = (product_gradient, inner, scaled)
        return Launch(gradients.activation_backward, grid, arguments, constants, keep)

    def gradient(
        self, plan: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor
    ) -> Launch:
        """Compute each expert's ``left.T @ right``, into ``out``."""
        sizes, config = self.sizes, self.config
        wide, narrow = left.shape[1], right.shape[1]
        # A tile that reached beyond one expert's gradient would overwrite the next expert's.
        even = self.tiles and wide % config.block_m == 0
        block = config.block_m, config.block_n
        arguments = {
            "plan": plan,
            "a": self.operand(left, wide, (config.block_k, config.block_m)),
            "b": self.operand(right, narrow, (config.block_k, config.block_n)),
            "out": self.operand(out, narrow, block) if even else out.data_ptr(),
            "rank": self.group.rank,
            "E": sizes.experts,
            "L": sizes.local,
            "wide": wide,
            "narrow": narrow,
        }
        constants = self.constants | {"EVEN": even}
        keep = (left, right)
        return Launch(gradients.grouped_gemm_gradient, (self.programs,), arguments, constants, keep)

    def bias_gradient(
        self,
        plan: torch.Tensor,
        rows: torch.Tensor,
        factors: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Launch:
        """Sum each expert's ``rows [arrivals, width]``, times ``factors``, into ``out``."""
        sizes, width = self.sizes, rows.shape[1]
        columns = min(next_power_of_2(max(width, 16)), _BIAS_COLUMNS)
        arguments = {
            "plan": plan,
            "rows_of": rows.data_ptr(),
            "factors": factors,
            "out": out,
            "rank": self.group.rank,
            "E": sizes.experts,
            "L": sizes.local,
            "width": width,
        }
        constants = {
            "WORLD_SIZE": sizes.world_size,
            "DTYPE": triton_dtype(self.dtype),
            "L_LANES": self.local_lanes,
            "ROWS": _BIAS_ROWS,
            "COLS": columns,
            "num_warps": 4,
        }
        items = sizes.local * ceil_div(width, columns)
        programs = min(items, self.programs * (8 if self.group.backend == "cuda" else 1))
        return Launch(gradients.bias_gradient, (programs,), arguments, constants, (rows,))
