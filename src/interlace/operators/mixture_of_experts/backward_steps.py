"""The launches that only a backward pass has: activation, gradients of weights and biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from interlace.comm.launching.kernels import Launch, triton_dtype
from interlace.operators.mixture_of_experts import layout
from interlace.operators.mixture_of_experts.steps import Steps
from interlace.units import ceil_div, next_power_of_2

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import Saved

# A program adds tiles of so many numbers, 16 of them per thread.
_BIAS_ROWS = 16
_BIAS_COLUMNS = 128


class BackwardSteps(Steps):
    """The launches of one backward pass."""

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
        from interlace.operators.mixture_of_experts.kernels.gradients import activation_backward

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
            "bias": self.b_out,
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
            "L_LANES": self.lanes["L_LANES"],
            "HALVES": self.in_order.halves,
            "FORM": self.call.form,
            "ROWS": rows,
            "COLS": columns,
            "num_warps": 4,
        }
        grid = (self.programs * (8 if self.group.backend == "cuda" else 1),)
        keep = (product_gradient, inner, scaled)
        return Launch(activation_backward, grid, arguments, constants, keep)

    def gradient(
        self, plan: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor
    ) -> Launch:
        """Compute each expert's ``left.T @ right``, into ``out``."""
        from interlace.operators.mixture_of_experts.kernels.gradients import grouped_gemm_gradient

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
        return Launch(grouped_gemm_gradient, (self.programs,), arguments, constants, keep)

    def bias_gradient(
        self,
        plan: torch.Tensor,
        rows: torch.Tensor,
        factors: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Launch:
        """Sum each expert's ``rows [arrivals, width]``, times ``factors``, into ``out``."""
        from interlace.operators.mixture_of_experts.kernels.gradients import bias_gradient

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
            "L_LANES": self.lanes["L_LANES"],
            "ROWS": _BIAS_ROWS,
            "COLS": columns,
            "num_warps": 4,
        }
        items = sizes.local * ceil_div(width, columns)
        programs = min(items, self.programs * (8 if self.group.backend == "cuda" else 1))
        return Launch(bias_gradient, (programs,), arguments, constants, (rows,))
