"""GEMM + ReduceScatter: the row-parallel linear layer under sequence parallelism; see README.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import Group
from interlace.comm.groups.registration import entrance
from interlace.gemm import schema
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.config import SumConfig
from interlace.gemm.implementations import network, two_levels
from interlace.gemm.implementations.fused import FUSED
from interlace.gemm.implementations.pushed import PUSHED_REDUCE_SCATTER
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.implementations.stock import ASYNC_REDUCE_SCATTER
from interlace.gemm.implementations.unfused import UNFUSED
from interlace.gemm.operator import GemmOperator, Splits
from interlace.gemm.splits import balanced, balanced_rows, check_sum, ranks_of
from interlace.operators.gemm_reduce_scatter import chunked, fused, reference
from interlace.registry import Implementation, operator


@dataclasses.dataclass(frozen=True)
class GemmReduceScatterConfig(SumConfig):
    """One way to run the fused kernel of ``gemm_reduce_scatter``."""


@operator
class GemmReduceScatter(GemmOperator):
    """``reduce_scatter(x @ w.T) + bias``: each rank's rows of the sum over ranks."""

    collective = "reduce_scatter"
    config_type = GemmReduceScatterConfig
    adds_ranks = True
    sum_name = "gemm_sum_reduce_scatter"
    implementations = (
        dataclasses.replace(
            FUSED, run=fused.run, is_batch_invariant=True, reservation=fused.reservation
        ),
        PUSHED_REDUCE_SCATTER,
        network.across_nodes(
            Implementation(
                "chunked",
                "torch.mm, copy engines for the peers' rows, and a kernel that adds the parts",
                chunked.run,
                needs(same_dtype=True),
                schedule="by_peer",
                reservation=chunked.reservation,
            ),
            two_levels.run_reduce_scatter,
            two_levels.needs_rails,
        ),
        UNFUSED,
        ASYNC_REDUCE_SCATTER,
    )

    def plan_rows(self, rows: int, splits: Splits, group: Group) -> RowPlan:
        """Return each rank's rows: as given, or as ``torch.tensor_split``."""
        (row_list,) = splits
        by_rank = balanced(rows, group.world_size) if row_list is None else row_list
        check_sum(f"{self.name}: splits", by_rank, group.world_size, rows, "the rows of x")
        return RowPlan(tuple(by_rank), (), by_rank[group.rank], rows, rows)

    def result_rows(self, rows: Any, splits: Splits, rank: int, world_size: int) -> Any:
        """Return this rank's share of the rows."""
        (row_list,) = splits
        return balanced_rows(rows, rank, world_size) if row_list is None else row_list[rank]

    def run_unfused(self, call: GemmCall) -> torch.Tensor:
        """Run ``F.linear``, then ``reduce_scatter``."""
        return reference.gemm_reduce_scatter(call.operands, call.rows.by_rank, call.process_group)

    def set_up_backward(self, ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Save both operands."""
        x, w, bias, _, _, splits, _, ctx.group_name, impl, _ = inputs
        # The gradient's operator has no product whose output could be the peers' memory.
        ctx.impl = impl if impl in (*self.choosers, "fused", "chunked", "unfused") else "auto"
        # The all-gather of the backward pass needs the rows of every rank, as they were divided. It
        # takes equal ones without a list, and finds such a call when it comes again.
        ranks = ranks_of(ctx.group_name, x.device)
        rows = x.shape[0]
        if splits is None and not (isinstance(rows, int) and rows % ranks == 0):
            splits = balanced(rows, ranks)
        ctx.splits = splits
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)

    def backward(self, ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Gather the gradients of all rows while x's gradient is computed from them.

        Each rank's part of K needs all of them.
        """
        (grad,) = grads
        assert grad is not None
        x, w = ctx.saved_tensors
        # The rows are gathered anyway; returning them costs a copy, which only w and bias need.
        needs_bias = ctx.has_bias and ctx.needs_input_grad[2]
        gather = x is not None or needs_bias
        grad_x, rows = entrance("all_gather_gemm")(
            grad.to(w.dtype),
            w.T,
            None,
            None,
            None,
            ctx.splits,
            w.dtype,
            gather,
            ctx.group_name,
            ctx.impl,
            "",
        )
        grad_w = rows.mT @ x if x is not None else None
        grad_bias = rows.sum(0, dtype=grad.dtype) if needs_bias else None
        return grad_x, grad_w, grad_bias


OPERATOR = schema.define(GemmReduceScatter.name)


def gemm_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    splits: Sequence[int] | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: GemmReduceScatterConfig | None = None,
) -> torch.Tensor:
    """Multiply and reduce-scatter the result's rows in one kernel.

    ``y = this rank's rows of (sum over ranks r of x_r @ w_r.T), + bias``: the row-parallel linear
    layer under sequence parallelism, its weight sharded along K, its output along tokens. While
    some programs still multiply, others' tiles are on their way to the rows' owner.

    Dimensions: M rows (tokens), K inner, N columns, R ranks.

    Products are summed in float32; what travels is rounded to ``out_dtype``; parts are added in
    float32, in rank order. Runs on the current stream, without synchronising the host; calls of one
    group on several streams are put in order.

    Args:
        x: ``[M, K/R]``: float16, bfloat16, float32 or float8_e4m3fn. Other than contiguous rows are
            copied.
        w: ``[N, K/R]``, as in ``nn.Linear``, of x's dtype: contiguous along K, or along N (``.T``
            of a contiguous ``[K, N]``), the same on every rank. An address or a stride that is no
            multiple of 16 bytes costs the fused kernel a copy in each call.
        bias: ``[N]`` of the result's dtype, the same on every rank; added once, after the sum.
        splits: Rows that each rank owns, the same list on every rank; they sum to M. Default: as
            ``torch.tensor_split``, the first ``M % R`` ranks one more than the others.
        x_scale: float32: what x's elements are to be multiplied by; needed with float8 and refused
            without. ``[]`` or ``[1]``; one a row: ``[M]`` or ``[M, 1]``; or one for 128 elements of
            a row: ``[M, ceil(K / 128)]``, which is fastest with contiguous columns.
        w_scale: The same for w: ``[]`` or ``[1]``; one a row: ``[N]`` or ``[1, N]``; or beside such
            scales of x one for 128 x 128 elements: ``[ceil(N / 128), ceil(K / 128)]``.
        out_dtype: Of the result and of the parts that travel: float16, bfloat16 or float32;
            default: x's, and bfloat16 for float8.
        out: Memory of the result's shape, dtype and device, contiguous, to write it to; default:
            new memory. In a symmetric tensor (:func:`interlace.empty_symmetric`)
            :func:`interlace.all_gather_gemm` need not stage it. Not where a gradient is recorded.
        group: 1 to 8 ranks of one node, or ranks of several nodes, between which ``"chunked"``
            sends slices over the network and ``"unfused"`` takes any call; default: the default
            process group.
        impl: The implementation. ``"fused"`` is a single kernel. ``"chunked"`` is ``torch.mm`` for
            the peers' rows, which copy engines send, and a kernel for this rank's own rows, or
            ``torch.mm`` and a kernel that adds, whichever is predicted to be faster.
            ``"pushed"`` is a product, then a kernel that stores the rows at their owners and adds
            them there (rows split evenly). ``"unfused"`` or ``"nccl"`` is ``F.linear``, then
            ``reduce_scatter``. ``"async_tp"`` is PyTorch's own pair, on GPUs. ``"auto"`` is the one
            of these that is predicted to be the fastest; :func:`interlace.explain` says which it is
            and why. ``"measured"`` is the one that the first call of a kind measures to be the
            fastest (:func:`interlace.autotune`). ``"batch_invariant"`` gives a row the same bits in
            every batch (:func:`interlace.batch_invariant`). An explicit choice is never replaced.
        config: The fused kernel's configuration, the same on every rank; default: the tuned
            table's.

    Returns:
        ``[splits[rank], N]`` of ``out_dtype``: ``out`` where that is given.

        Gradients, of which every rank must run the backward pass: ``grad_x, gathered =
        all_gather_gemm(grad, w.T)`` (fused too), ``grad_w = gathered.T @ x``; bias gets the sum of
        ``gathered`` over rows, the same on every rank.

    Raises:
        ArgumentError: shapes, strides, dtypes, devices or splits do not fit; or float8 operands
            require gradients, or any operand does where ``out`` is given.
        RankMismatchError: ranks differ in shapes, dtypes, bias, splits, impl or config; raised on
            every rank.
        GroupError: the group is too large.
        BackendError: float8 on a GPU without it (compute capability below 8.9).
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its output with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> # x_shard_k [4096, 8192/R], w_shard_k [4096, 8192/R], y [4096/R, 4096]
        >>> y = interlace.gemm_reduce_scatter(x_shard_k, w_shard_k)

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), for the fusion; Korthikanti et al.
    (arXiv:2205.05198) for sequence parallelism.
    """
    y: torch.Tensor = schema.call(
        OPERATOR, x, w, bias, x_scale, w_scale, [splits], out_dtype, group, impl, config, out=out
    )
    return y
