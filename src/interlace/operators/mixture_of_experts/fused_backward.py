"""``impl="fused"``, backward: gradients travel as tokens do, and results as results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import Group
from interlace.comm.groups.outputs import Output
from interlace.comm.launching.kernels import Launch, triton_dtype
from interlace.comm.replay.deferred import DeferredCall
from interlace.comm.replay.replays import places
from interlace.comm.runtime.interpreter import require
from interlace.operators.mixture_of_experts import layout, unfused
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.operators.mixture_of_experts.fused import (
    Steps,
    buffer_bytes,
    places_of,
    temporary_bytes,
    workspaces,
)
from interlace.units import ceil_div, next_power_of_2

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import LayerCall, Saved

# A program adds tiles of so many numbers, 16 of them per thread.
_BIAS_ROWS = 16
_BIAS_COLUMNS = 128


def run(
    call: LayerCall, grad: torch.Tensor, saved: Saved, needed: Sequence[bool]
) -> DeferredCall | tuple[torch.Tensor, ...]:
    """Return the work whose results are the gradients of x, weights, w_in, w_out, b_in and b_out.

    The last four are empty unless they are ``needed``.
    """
    if not call.saves:
        return unfused.backward(call, grad, saved, needed)

    def prepared(space: Output, *gradients: torch.Tensor) -> Callable[[], None]:
        workspaces(call, _BACKWARD)  # what may have to grow

        def enqueue() -> None:
            for launch in prepare(call, grad, saved, needed, (space, *gradients))[0]:
                launch()

        return enqueue

    return DeferredCall(
        (_BACKWARD, call.mark, tuple(needed), *call.key, *places(grad, *saved)),
        _take(call, needed),
        prepared,
        _gradients,
        where=places_of,
        with_libraries=False,
        temporary_bytes=temporary_bytes(call, call.sizes.arrivals, 2 + call.sizes.gates),
    )


_BACKWARD = f"{OPERATOR}.backward"


def _take(
    call: LayerCall, needed: Sequence[bool]
) -> Callable[[Group], tuple[Output | torch.Tensor, ...]]:
    """Return what takes the memory of a backward pass: where peers' gradients arrive, and the
    gradients of x, weights and parameters.
    """
    nbytes, device = buffer_bytes(call.sizes, call.x.dtype), call.x.device
    dtype, x = call.x.dtype, call.x.shape
    slots, slot_dtype = call.weights.shape, call.weights.dtype
    parameters = call.parameters.gradient_shapes(needed)

    def take(group: Group) -> tuple[Output | torch.Tensor, ...]:
        return (
            group.outputs.landing(nbytes),
            torch.empty(x, dtype=dtype, device=device),
            torch.empty(slots, dtype=slot_dtype, device=device),
            *(
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride in parameters
            ),
        )

    return take


def _gradients(space: Output, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return gradients


def prepare(
    call: LayerCall,
    grad: torch.Tensor,
    saved: Saved,
    needed: Sequence[bool],
    memory: tuple[Any, ...] | None = None,
) -> tuple[list[Launch], tuple[torch.Tensor, ...]]:
    """Prepare the launches of the backward pass, in order; return them and the gradients.

    They are: dispatch of gradients and product with w_out; activation; product with w_in and
    combine; gradients of the weights and biases, while the peers' results arrive; sum.

    Args:
        call: The call.
        grad: The gradient of y.
        saved: The tensors of the forward pass.
        needed: Which parameters' gradients are needed.
        memory: Where peers' gradients arrive, and the gradients; new by default.
    """
    sizes = call.sizes
    require(call.group.backend)

    steps = BackwardSteps(call, _BACKWARD)
    like, rows = call.x, sizes.arrivals
    product_gradient, scaled = like.new_empty(rows, sizes.ffn), like.new_empty(rows, sizes.ffn)
    inner_gradient = like.new_empty(rows, sizes.gates * sizes.ffn)
    factors = None if call.b_out is None else like.new_empty(rows, dtype=torch.float32)
    taken: tuple[Any, ...] = memory or _take(call, needed)(call.group)
    space, grad_x, grad_weights, *grads = taken
    met = torch.empty(1, dtype=torch.int32, device=like.device)
    arrived = space.tensor((rows, sizes.hidden), like.dtype, like.device)
    launches = [
        steps.dispatch_backward(grad, saved, product_gradient, met, space),
        steps.activation(saved, met, product_gradient, inner_gradient, scaled, arrived, factors),
        steps.combine(saved.plan, inner_gradient, met=met),
    ]
    grad_in, grad_out, grad_b_in, grad_b_out = grads
    if needed[0]:
        # The columns of the gradient in memory are those of the second operand.
        pair = inner_gradient, saved.received
        left, right = pair if steps.in_order.along_k else pair[::-1]
        target, _ = layout.in_memory_order(grad_in)
        launches.append(steps.gradient(saved.plan, left, right, target))
    if needed[1]:
        pair = arrived, scaled
        left, right = pair if steps.out_order.along_k else pair[::-1]
        target, _ = layout.in_memory_order(grad_out)
        launches.append(steps.gradient(saved.plan, left, right, target))
    if grad_b_in.numel():
        launches.append(steps.bias_gradient(saved.plan, inner_gradient, None, grad_b_in))
    if grad_b_out.numel():
        launches.append(steps.bias_gradient(saved.plan, arrived, factors, grad_b_out))
    launches.append(steps.sum(saved, None, grad_x, grad_weights))
    return launches, (grad_x, grad_weights, *grads)


class BackwardSteps(Steps):
    """The launches of one backward pass."""

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
        from interlace.operators.mixture_of_experts.kernels.dispatch import (
            dispatch_grouped_gemm_backward,
        )

        sizes, config = self.sizes, self.config
        along_k = not self.out_order.along_k
        block = config.block_m, config.block_n
        arguments = {
            **self.pushing_arguments(saved, space),
            "grad": grad.contiguous(),
            "scales": self.call.weights,
            "b": self.weight(self.w_out, sizes.ffn, sizes.hidden, along_k),
            "out": self.operand(product_gradient, sizes.ffn, block),
            "met": met,
            "buffer": space.address + space.index * space.buffer_bytes,
            "scale_bytes": self.scale_bytes,
            "columns": sizes.ffn,
        }
        grid, constants = (config.push_programs + self.programs,), self.pushing_constants(along_k)
        keep = (self.w_out, product_gradient)
        return Launch(dispatch_grouped_gemm_backward, grid, arguments, constants, keep)

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
            "L_LANES": self.local_lanes,
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
            "L_LANES": self.local_lanes,
            "ROWS": _BIAS_ROWS,
            "COLS": columns,
            "num_warps": 4,
        }
        items = sizes.local * ceil_div(width, columns)
        programs = min(items, self.programs * (8 if self.group.backend == "cuda" else 1))
        return Launch(bias_gradient, (programs,), arguments, constants, (rows,))
