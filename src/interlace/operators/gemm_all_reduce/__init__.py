"""GEMM + AllReduce: the row-parallel linear layer of tensor parallelism; see README.md."""

from __future__ import annotations

import dataclasses
from typing import Any, cast, overload

import torch
import torch.distributed as dist

from interlace.comm import Group
from interlace.gemm import schema
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.config import SumConfig
from interlace.gemm.epilogue import (
    Norm,
    Normed,
    call_normed,
    refuse_with_norm,
    refuse_without_norm,
)
from interlace.gemm.gradients import product_gradients, save_operands
from interlace.gemm.implementations import network, two_levels
from interlace.gemm.implementations.chunked import CHUNKED
from interlace.gemm.implementations.fused import FUSED
from interlace.gemm.implementations.gemv import GEMV
from interlace.gemm.implementations.pushed import PUSHED_ALL_REDUCE
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.implementations.remote_stores import REMOTE_STORES
from interlace.gemm.implementations.stock import NCCL, ONE_SHOT, TWO_SHOT
from interlace.gemm.implementations.unfused import UNFUSED
from interlace.gemm.operator import GemmOperator, Splits
from interlace.gemm.splits import balanced
from interlace.operators.gemm_all_reduce import fused, reference
from interlace.registry import operator
from interlace.tuning.configuration import Configuration


@dataclasses.dataclass(frozen=True)
class GemmAllReduceConfig(SumConfig):
    """One way to run the fused kernel of ``gemm_all_reduce``."""


@operator
class GemmAllReduce(GemmOperator):
    """``all_reduce(x @ w.T) + bias``: the sum over ranks, on every rank."""

    collective = "all_reduce"
    config_type = GemmAllReduceConfig
    split_names = ()
    norm_name = "gemm_all_reduce_norm"
    adds_ranks = True
    implementations = (
        dataclasses.replace(FUSED, is_batch_invariant=True),
        GEMV,
        # Which rank sums which rows is nobody's business, so they need not divide evenly.
        dataclasses.replace(
            REMOTE_STORES, refusal=needs(same_dtype=True, no_bias=True), schedule="whole"
        ),
        PUSHED_ALL_REDUCE,
        network.across_nodes(
            dataclasses.replace(CHUNKED, refusal=needs(same_dtype=True)),
            two_levels.run_all_reduce,
            two_levels.needs_rails,
        ),
        UNFUSED,
        NCCL,
        ONE_SHOT,
        TWO_SHOT,
    )

    def plan_rows(self, rows: int, splits: Splits, group: Group) -> RowPlan:
        """Return the rows whose sums each rank computes, as ``torch.tensor_split``."""
        # The shares matter to the exchange alone: the result has all rows on every rank.
        return RowPlan(tuple(balanced(rows, group.world_size)), (), rows, rows, rows)

    def result_rows(self, rows: Any, splits: Splits, rank: int, world_size: int) -> Any:
        """Return all rows."""
        return rows

    def run_fused(self, call: GemmCall) -> torch.Tensor:
        """Run the kernel of :mod:`interlace.operators.gemm_all_reduce.kernel`."""
        return fused.run(call)

    def run_unfused(self, call: GemmCall) -> torch.Tensor:
        """Run ``F.linear``, then ``all_reduce``."""
        return reference.gemm_all_reduce(call.operands.factors(), call.process_group)

    def set_up_backward(self, ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Save the operands whose gradients are needed."""
        *_, ctx.group_name, _, _ = inputs
        save_operands(ctx, *inputs[:3])

    def backward(self, ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Compute all gradients without communication.

        The output is the same on every rank, and so is its gradient.
        """
        (grad,) = grads
        assert grad is not None
        return product_gradients(ctx, grad, is_replicated=True)


OPERATOR = schema.define(GemmAllReduce.name)


@overload
def gemm_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: GemmAllReduceConfig | None = None,
) -> torch.Tensor: ...
@overload
def gemm_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: Configuration | None = None,
) -> Normed: ...
def gemm_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: Configuration | None = None,
) -> torch.Tensor | Normed:
    """Multiply and all-reduce the result in one kernel.

    ``y = sum over ranks r of x_r @ w_r.T, + bias``: the row-parallel linear layer of a Transformer
    for many tokens (training, prefill), its weight sharded along K. While some programs still
    multiply, others' tiles are on their way to be added. For up to some hundred tokens, see
    :func:`interlace.gemv_all_reduce`.

    Dimensions: M rows (tokens), K inner, N columns, R ranks.

    Products are summed in float32; what travels is rounded to ``out_dtype``; parts are added in
    float32, in rank order: the result is the same, bit by bit, on every rank. Runs on the current
    stream, without synchronising the host; calls of one group on several streams are put in order.

    Args:
        x: ``[M, K/R]``: float16, bfloat16, float32 or float8_e4m3fn. Other than contiguous rows are
            copied.
        w: ``[N, K/R]``, as in ``nn.Linear``, of x's dtype: contiguous along K, or along N (``.T``
            of a contiguous ``[K, N]``). An address or a stride that is no multiple of 16 bytes
            costs the fused kernel a copy in each call.
        bias: ``[N]`` of the result's dtype, the same on every rank; added once, after the sum.
        x_scale: float32: what x's elements are to be multiplied by; needed with float8 and refused
            without. ``[]`` or ``[1]``, or one a row: ``[M]`` or ``[M, 1]``.
        w_scale: The same for w: ``[]`` or ``[1]``, or one a row: ``[N]`` or ``[1, N]``.
        residual, norm, norm_weight, norm_bias, eps, scale: As :func:`interlace.gemv_all_reduce`
            takes them, for up to some hundred rows without gradients; x must not be float8 then.
        out_dtype: Of the result and of the parts that travel: float16, bfloat16 or float32;
            default: x's, and bfloat16 for float8. With a norm, the dtype of its result, and
            float8_e4m3fn is one more.
        group: 1 to 8 ranks of one node, or ranks of several nodes, between which ``"chunked"``
            sends slices over the network and ``"unfused"`` takes any call; default: the default
            process group.
        impl: The implementation. ``"fused"`` is a single kernel. ``"gemv"`` is the kernel of
            :func:`interlace.gemv_all_reduce` (16 rows at most). ``"remote_stores"`` is ``torch.mm``
            with the peers' memory as its output (rows split evenly, no bias). ``"pushed"`` is
            a product, then one kernel that sends this rank's part to all and adds theirs (16 MiB
            at most). ``"chunked"`` is ``torch.mm`` for each rank's rows, which copy engines send.
            ``"unfused"`` is ``F.linear``, then ``all_reduce``. ``"nccl"``, ``"one_shot"`` and
            ``"two_shot"`` are PyTorch's own pairs, on GPUs. ``"auto"`` is the one of these that is
            predicted to be the fastest; :func:`interlace.explain` says which it is and why.
            ``"measured"`` is the one that the first call of a kind measures to be the fastest
            (:func:`interlace.autotune`).
            ``"batch_invariant"`` gives a row the same bits in every batch
            (:func:`interlace.batch_invariant`). An explicit choice is never replaced.
        config: The fused kernel's configuration, the same on every rank; default: the tuned
            table's.

    Returns:
        ``[M, N]`` of ``out_dtype``, the same on every rank. With a norm, a
        :class:`interlace.Normed`.

        Its gradient must be the same on every rank too, as it is when each rank goes on with the
        same computation: x gets ``grad @ w``, w gets ``grad.T @ x``, bias gets the sum of ``grad``
        over rows, all without communication.

        The fused kernel's result lies in the group's symmetric memory. If another stream reads it,
        keep it until this one has waited for that; ``record_stream`` does nothing here, as the
        memory is not torch's.

    Raises:
        ArgumentError: shapes, strides, dtypes, devices do not fit; or float8 operands require
            gradients.
        RankMismatchError: ranks differ in shapes, dtypes, bias, impl or config; raised on every
            rank.
        GroupError: the group is too large.
        BackendError: float8 on a GPU without it (compute capability below 8.9).
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its output with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> # x_shard_k [4096, 8192/R], w_shard_k [4096, 8192/R], y [4096, 4096]
        >>> y = interlace.gemm_all_reduce(x_shard_k, w_shard_k)

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), for the fusion and the two phases.
    """
    if norm is not None or norm_weight is not None:
        refuse_with_norm(OPERATOR.name, x_scale=x_scale, w_scale=w_scale)
        return call_normed(
            OPERATOR, x, w, bias, residual=residual, norm=norm, norm_weight=norm_weight,
            norm_bias=norm_bias, eps=eps, scale=scale, out_dtype=out_dtype, group=group, impl=impl,
            config=config,
        )  # fmt: skip
    refuse_without_norm(OPERATOR.name, residual=residual, norm_bias=norm_bias, scale=scale)
    y: torch.Tensor = schema.call(
        OPERATOR, x, w, bias, x_scale, w_scale, [], out_dtype, group, impl, cast(Any, config)
    )
    return y
