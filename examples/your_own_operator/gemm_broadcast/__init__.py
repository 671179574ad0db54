"""GEMM + broadcast: rank 0's product on every rank, sent tile by tile as it is computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm import Group, process_group_named
from interlace.costs import cost_of
from interlace.costs.gemm import ProductCost, ProductSizes, takes_sizes
from interlace.gemm import schema
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.config import GemmConfig
from interlace.gemm.implementations.fused import FUSED
from interlace.gemm.implementations.unfused import UNFUSED
from interlace.gemm.operator import GemmOperator, Splits

ROOT = 0
"""The rank whose product every rank gets."""


@interlace.operator
class GemmBroadcast(GemmOperator):
    """``broadcast(x @ w.T + bias)``: the root's product on every rank."""

    collective = "broadcast"
    split_names = ()
    takes_float8 = False  # its kernel applies no scales
    implementations = (FUSED, UNFUSED)

    def plan_rows(self, rows: int, splits: Splits, group: Group) -> RowPlan:
        """Return all rows: every rank has the whole result."""
        return RowPlan(by_rank=(), sent=(), result=rows, product=rows, total=rows)

    def result_rows(self, rows: Any, splits: Splits, rank: int, world_size: int) -> Any:
        """Return all rows."""
        return rows

    def run_fused(self, call: GemmCall) -> torch.Tensor:
        """Run the kernel, by which Triton is imported: the first call does it, not the import."""
        from gemm_broadcast import fused

        return fused.run(call)

    def run_unfused(self, call: GemmCall) -> torch.Tensor:
        """Run ``F.linear`` on the root, then ``broadcast``."""
        from gemm_broadcast import reference

        operands = call.operands
        return reference.gemm_broadcast(
            operands.x, operands.w, operands.bias, ROOT, call.process_group
        )

    def set_up_backward(self, ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Save the operands; only the root's have a gradient."""
        x, w, bias, *_, ctx.group_name, _, _ = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)

    def backward(self, ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the root's gradients from the sum of all ranks' gradients of the result.

        Each rank uses the same result for something else, so the gradient of the product is the
        sum of theirs. The other ranks' operands have no influence: their gradients are zero.
        """
        (grad,) = grads
        assert grad is not None
        x, w = ctx.saved_tensors
        total = grad
        if dist.is_initialized():
            process_group = process_group_named(ctx.group_name) or dist.group.WORLD
            # As PyTorch's functional collective, which compilers can trace.
            collectives, name = torch.ops._c10d_functional, process_group.group_name
            total = collectives.wait_tensor(collectives.all_reduce(grad.contiguous(), "sum", name))
            if dist.get_rank(process_group) != ROOT:
                total = torch.zeros_like(total)
        grad_bias = total.sum(0) if ctx.has_bias else None
        total = total.to(x.dtype)
        return total @ w, total.mT @ x, grad_bias


OPERATOR = schema.define(GemmBroadcast.name)


@cost_of(GemmBroadcast.name, computation="GEMM", collective="broadcast")
@takes_sizes
def cost(sizes: ProductSizes, *, rank: int = ROOT) -> ProductCost:
    """Compute the cost of one rank: the root multiplies and sends, the others receive."""
    size = sizes.output_bytes
    if rank != ROOT:
        # The root's stores arrive in a landing, which is copied into the result.
        return ProductCost(0, size, 0, 2 * size, size)
    sent = (sizes.world_size - 1) * size
    return ProductCost(sizes.flops, sizes.operand_bytes + size, sent, 0, size)


def gemm_broadcast(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Multiply on rank 0 and give every rank the result.

    Args:
        x: ``[M, K]``, float16, bfloat16 or float32; of other ranks only shape and dtype count.
        w: ``[N, K]``, of x's dtype.
        bias: ``[N]``, or None.
        group: 1 to 8 ranks of one machine; default: the default process group.
        impl: ``"fused"``, ``"unfused"`` or ``"auto"``.
        config: How the kernel cuts its work; the same on every rank.

    Returns:
        ``[M, N]`` of x's dtype, the same on every rank.

    Raises:
        interlace.ArgumentError: Shapes or dtypes do not fit.
        interlace.RankMismatchError: Ranks differ in them.
        interlace.PeerTimeoutError: A rank did not make this call before the deadline.

    Example:
        >>> y = gemm_broadcast(x, w)  # [4096, 1024], [2048, 1024] -> [4096, 2048] on every rank
    """
    y: torch.Tensor = schema.call(OPERATOR, x, w, bias, None, None, [], None, group, impl, config)
    return y
