"""The launches of one call, step by step: dispatch, combine and sum, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from interlace.gemm.launch import has_descriptors, tile_ns
from interlace.operators.mixture_of_experts import layout
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.units import ceil_div, next_power_of_2, round_up

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import LayerCall, Saved

_RESULTS = f"{OPERATOR}.results"


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

    def __init__(self, call: LayerCall, operator: str, mark: int) -> None:
        from interlace.gemm.kernels.tiles import Tiling

        group, sizes = call.group, call.sizes
        self.call, self.group, self.sizes, self.mark = call, group, sizes, mark
        _, self.config = call.chosen
        self.dtype = call.x.dtype
        self.w_in, self.in_order = layout.in_memory_order(call.w_in)
        self.w_out, self.out_order = layout.in_memory_order(call.w_out)
        self.b_in = None
        if call.b_in is not None:
            self.b_in = layout.bias_in_order(call.b_in, self.in_order)
        self.b_out = None if call.b_out is None else call.b_out.contiguous()
        ranks, experts = sizes.world_size, sizes.experts
        self.workspace = group.workspace(operator, 4 * ranks * (experts + 1), layout.SIGNALS)
        self.context = group.context(operator)
        row_bytes = sizes.hidden * self.dtype.itemsize
        self.scale_bytes = sizes.arrivals * row_bytes
        self.buffer_bytes = self.scale_bytes + 4 * sizes.arrivals
        # The workspace's two halves are used as one: peers write here only once this rank is in its
        # next call.
        self.results = group.workspace(
            _RESULTS, ceil_div(sizes.returns * (row_bytes + 4), 2)
        ).data.address
        self.gradients = self.results + round_up(sizes.returns * row_bytes, 16)
        self.lanes = {
            "E_LANES": next_power_of_2(max(experts, 2)),
            "L_LANES": next_power_of_2(max(sizes.local, 2)),
        }
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
            "L_LANES": self.lanes["L_LANES"],
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

    def dispatch(
        self,
        x: torch.Tensor,
        saved: Saved,
        out: torch.Tensor,
        space: Output,
        *,
        kept: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        grants: torch.Tensor | None = None,
        met: torch.Tensor | None = None,
    ) -> Launch:
        """Send rows of ``x`` to their experts and multiply the rows that arrive.

        Forward, the weight is w_in; backward, where ``x`` is the gradient of y, it is w_out.

        Args:
            space: The buffers of all ranks that rows arrive in.
            kept: Forward, if a backward pass follows: gate and up are stored here.
            scales: Backward: the slots' weights, which travel with the rows.
            grants: Forward: the indices of the ranks' buffers. Without them, all ranks' indices are
                the same, and ranks have yet to meet.
            met: Backward: int32 ``[1]``, which becomes 1 once ranks have met.
        """
        from interlace.operators.mixture_of_experts.kernels.dispatch import (
            RowPushing,
            dispatch_grouped_gemm,
        )

        sizes, config, forward = self.sizes, self.config, grants is not None
        gates = sizes.gates if forward else 1
        columns, width = gates * sizes.ffn, config.block_n // gates
        if forward:
            weight, along_k, halves = self.w_in, *self.in_order
        else:
            weight, along_k, halves = self.w_out, not self.out_order.along_k, False
        own_buffer = (
            space.address + space.index * space.buffer_bytes + self.group.rank * self.group.stride
        )
        # The product reads arriving rows from this rank's own buffer, which peers write.
        a_tiles = None
        if self.tiles:
            block = config.block_m, config.block_k
            a_tiles = self._matrix(own_buffer, sizes.arrivals, sizes.hidden, block)
        push_rows = max(config.push_rows, next_power_of_2(ceil_div(sizes.tokens, MAX_PROGRAMS)))
        rows, row_columns = layout.push_tile(
            sizes.hidden, self.dtype.itemsize, config.num_warps, push_rows
        )
        x = x.contiguous()
        # Programs take tickets for tiles, because experts get different numbers of rows.
        ticket = torch.zeros(1, dtype=torch.int32, device=x.device)
        block = config.block_m, width
        arguments = {
            "x": x,
            "slot_at": saved.slot_at,
            "scales": scales,
            "plan": saved.plan,
            "grants": grants,
            "a_tiles": a_tiles,
            "b": self.weight(weight, columns, sizes.hidden, along_k, halves),
            "bias": self.b_in if forward else None,
            "out": self.operand(out, sizes.ffn, block),
            "kept": None if kept is None else self.operand(kept, sizes.ffn, block),
            "ticket": ticket,
            "met": met,
            "buffers": space.address,
            "signals": self.workspace.signals.address,
            "epochs": self.workspace.epochs,
            "ctx": self.context,
            "call": self.mark,
            "buffer_bytes": space.buffer_bytes,
            "scale_bytes": self.scale_bytes,
            "buffer_index": space.index,
            "arrivals": sizes.arrivals,
            "E": sizes.experts,
            "L": sizes.local,
            "columns": columns,
            "hidden_groups": sizes.hidden // self.align,
        }
        constants = self.constants | {
            "TILING": self.tiling._replace(w_along_k=along_k),
            "HALVES": halves,
            "FORM": self.call.form,
            "PUSHING": RowPushing(
                config.push_programs,
                push_rows,
                rows,
                row_columns,
                sizes.top_k,
                self.align,
                self.lanes["E_LANES"],
            ),
        }
        grid = (config.push_programs + self.programs,)
        return Launch(dispatch_grouped_gemm, grid, arguments, constants, (weight, out, kept))

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
