"""GEMM + AllReduce: the row-parallel linear layer of tensor parallelism; see README.md."""

from __future__ import annotations

import dataclasses
from typing import Any, cast, overload

import torch
import torch.distributed as dist

from interlace.comm import Group
from interlace.costs.known_profiles import cached_by_profiles
from interlace.errors import ArgumentError
from interlace.gemm import schema
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.choice import by_class, choose_product, kernel_or_product
from interlace.gemm.epilogue import Norm, Normed
from interlace.gemm.gradients import product_gradients, save_operands
from interlace.gemm.implementations import network, two_levels
from interlace.gemm.implementations.chunked import CHUNKED
from interlace.gemm.implementations.fused import FUSED
from interlace.gemm.implementations.pushed import PUSHED_ALL_REDUCE
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.implementations.remote_stores import REMOTE_STORES
from interlace.gemm.implementations.stock import SYMM_MEM
from interlace.gemm.implementations.unfused import UNFUSED
from interlace.gemm.operands import Operands, require_float, require_tensors
from interlace.gemm.operator import GemmOperator, Splits
from interlace.gemm.splits import balanced
from interlace.operators.gemm_all_reduce import fused, gemv, reference
from interlace.operators.gemm_all_reduce.config import GemmAllReduceConfig, GemvAllReduceConfig
from interlace.operators.gemm_all_reduce.normed import (
    call_normed,
    refuse_without_norm,
)
from interlace.registry import operator
from interlace.tuning.choice import Choice
from interlace.tuning.configuration import Configuration


@operator
class GemmAllReduce(GemmOperator):
    """``all_reduce(x @ w.T) + bias``: the sum over ranks, on every rank."""

    collective = "all_reduce"
    config_type = GemmAllReduceConfig
    split_names = ()
    vector_name = "gemv_all_reduce"
    adds_ranks = True
    implementations = (
        dataclasses.replace(
            FUSED, run=fused.run, is_batch_invariant=True, reservation=fused.reservation
        ),
        gemv.GEMV,
        REMOTE_STORES,
        PUSHED_ALL_REDUCE,
        network.across_nodes(
            dataclasses.replace(CHUNKED, refusal=needs(same_dtype=True)),
            two_levels.run_all_reduce,
            two_levels.needs_rails,
        ),
        UNFUSED,
        SYMM_MEM,
    )

    def plan_rows(self, rows: int, splits: Splits, group: Group) -> RowPlan:
        """Return the rows whose sums each rank computes, as ``torch.tensor_split``."""
        # The shares matter to the exchange alone: the result has all rows on every rank.
        return RowPlan(tuple(balanced(rows, group.world_size)), (), rows, rows, rows)

    def result_rows(self, rows: Any, splits: Splits, rank: int, world_size: int) -> Any:
        """Return all rows."""
        return rows

    def choose(self, **call: Any) -> Choice[Any]:
        """Return what ``impl="auto"`` runs: by predicted times, for many rows by their class,
        unless the table of the kernel for few rows has the very sizes.
        """
        return _choose(**by_class(self.name, call))

    def invariant_choice(
        self,
        operands: Operands,
        choice: Choice[Any],
        world_size: int,
        *,
        for_all_ranks: bool = False,
    ) -> Choice[Any]:
        """Return a choice with the configurations of batch-invariant calls."""
        invariant = super().invariant_choice(
            operands, choice, world_size, for_all_ranks=for_all_ranks
        )
        sizes = operands.sizes(operands.rows) | {"world_size": world_size}
        return gemv.with_invariant_tiles(invariant, sizes)

    def run_unfused(self, call: GemmCall) -> torch.Tensor:
        """Run ``F.linear``, then ``all_reduce``."""
        return reference.gemm_all_reduce(call.operands, call.process_group)

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


@cached_by_profiles  # plug-ins of engines ask in every call of a layer
def _choose(**call: Any) -> Choice[Any]:
    is_few = gemv.is_default(
        call["rows"], call["dtype"], call.get("out_dtype"), call.get("w_along_k", True)
    )
    default = gemv.GEMV.name if is_few else kernel_or_product(FUSED.name, **call)
    choice = choose_product(GemmAllReduce.name, GemmAllReduceConfig, default=default, **call)
    return gemv.with_table(choice, **call)


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
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    norm_weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    scale: torch.Tensor | None = None,
    block_scales: bool = False,
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
    block_scales: bool = False,
    out_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: Configuration | None = None,
) -> torch.Tensor | Normed:
    """Multiply and all-reduce the result in one kernel.

    ``y = sum over ranks r of x_r @ w_r.T, + bias``: the row-parallel linear layer of a Transformer
    for many tokens (training, prefill), its weight sharded along K. While some programs still
    multiply, others' tiles are on their way to be added. With few tokens, as in decoding, programs
    send sums while others still read weights; :func:`interlace.gemv_all_reduce` is the same
    function and takes a single token as a vector, too.

    Dimensions: M rows (tokens), K inner, N columns, R ranks.

    Products are summed in float32; what travels is rounded to ``out_dtype``; parts are added in
    float32, in rank order: the result is the same, bit by bit, on every rank. Runs on the current
    stream, without synchronising the host; calls of one group on several streams are put in order.

    Args:
        x: ``[M, K/R]``: float16, bfloat16, float32 or float8_e4m3fn. Other than contiguous rows are
            copied.
        w: ``[N, K/R]``, as in ``nn.Linear``, of x's dtype: contiguous along K, or along N (``.T``
            of a contiguous ``[K, N]``), the same on every rank. An address or a stride that is no
            multiple of 16 bytes costs the fused kernel a copy in each call.
        bias: ``[N]`` of the result's dtype, the same on every rank; added once, after the sum.
        x_scale: float32: what x's elements are to be multiplied by; needed with float8 and refused
            without. ``[]`` or ``[1]``; one a row: ``[M]`` or ``[M, 1]``; or one for 128 elements of
            a row: ``[M, ceil(K / 128)]``, which is fastest with contiguous columns.
        w_scale: The same for w: ``[]`` or ``[1]``; one a row: ``[N]`` or ``[1, N]``; or beside such
            scales of x one for 128 x 128 elements: ``[ceil(N / 128), ceil(K / 128)]``.
        residual: ``[M, N]`` of x's dtype, the same on every rank: added to the sum before the norm.
        norm: ``"rms"`` or ``"layer"``: the result is normalised over N, as what follows this layer
            in a Transformer; ``"rms"`` where ``norm_weight`` is given alone. For up to some hundred
            rows, without gradients.
        norm_weight: ``[N]``, float16, bfloat16 or float32: what the normalised sum is multiplied
            by; None for 1.
        norm_bias: ``[N]``, the same: what is added to that; None for 0.
        eps: What is added to the mean square, or to the variance.
        scale: float32, one element, for ``out_dtype=torch.float8_e4m3fn``: the normalised sum is
            divided by it. Without it each row gets a scale of its own.
        block_scales: Without ``scale``, whether each 128 elements of a row get one instead, as the
            next product of float8 takes them: ``x_scale``.
        out_dtype: Of the result and of the parts that travel: float16, bfloat16 or float32;
            default: x's, and bfloat16 for float8. With a norm, the dtype of its result, and
            float8_e4m3fn is one more.
        group: 1 to 8 ranks of one node, or ranks of several nodes, between which ``"chunked"``
            sends slices over the network and ``"unfused"`` takes any call; default: the default
            process group.
        impl: The implementation. ``"fused"`` is a single kernel. ``"gemv"`` is a single kernel
            for few rows, which reads the weight along K (float16, bfloat16 or float32).
            ``"remote_stores"`` is ``torch.mm`` with the peers' memory as its output (rows split
            evenly, no bias). ``"pushed"`` is a product, then one kernel that sends this rank's part
            to all and adds theirs (16 MiB at most). ``"chunked"`` is ``torch.mm`` for each rank's
            rows, which copy engines send. ``"unfused"`` or ``"nccl"`` is ``F.linear``, then
            ``all_reduce``. ``"symm_mem"`` is ``torch.mm``, then PyTorch's all-reduce in symmetric
            memory, one-shot or two-shot by size, on GPUs.
            ``"auto"`` is the one of these that was measured for a table, or is predicted, to be the
            fastest; :func:`interlace.explain` says which it is and why.
            ``"measured"`` is the one that the first call of a kind measures to be the fastest
            (:func:`interlace.autotune`).
            ``"batch_invariant"`` gives a row the same bits in every batch
            (:func:`interlace.batch_invariant`). An explicit choice is never replaced.
        config: The configuration of ``"fused"``, a ``GemmAllReduceConfig``, or of ``"gemv"``, a
            :class:`interlace.GemvAllReduceConfig`; the same on every rank; default: the tuned
            table's. With a norm, a :class:`interlace.GemmAllReduceNormConfig`.

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
        return call_normed(
            x, w, bias, residual=residual, norm=norm, norm_weight=norm_weight, norm_bias=norm_bias,
            eps=eps, scale=scale, out_dtype=out_dtype, block_scales=block_scales, x_scale=x_scale,
            w_scale=w_scale, group=group, impl=impl, config=config,
        )  # fmt: skip
    refuse_without_norm(
        OPERATOR.name,
        residual=residual, norm_bias=norm_bias, scale=scale, block_scales=block_scales or None,
    )  # fmt: skip
    y: torch.Tensor = schema.call(
        OPERATOR, x, w, bias, x_scale, w_scale, [], out_dtype, group, impl, cast(Any, config)
    )
    return y


@overload
def gemv_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: GemmAllReduceConfig | GemvAllReduceConfig | None = None,
) -> torch.Tensor: ...
@overload
def gemv_all_reduce(
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
    block_scales: bool = False,
    out_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: Configuration | None = None,
) -> Normed: ...
def gemv_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    scale: torch.Tensor | None = None,
    block_scales: bool = False,
    out_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: Configuration | None = None,
) -> torch.Tensor | Normed:
    """Multiply a matrix by a vector, or by a few, and all-reduce the result, in one kernel.

    ``y = sum over ranks r of x_r @ w_r.T, + bias``: the row-parallel linear layer of a
    Transformer's decoding step, its weight sharded along K. It is
    :func:`interlace.gemm_all_reduce`, which takes every argument in the same way, of few rows: x
    may be a vector, and rows of w must be contiguous.

    The partial sums of ``impl="gemv"`` are float32 and are added in rank order, so its result is
    the same, bit by bit, on every rank and in every run. Runs on the current stream, without
    synchronising the host; calls of one group on several streams are put in order.

    Args:
        x: ``[K/R]`` or ``[B, K/R]``: float16, bfloat16 or float32; B is meant to be 1 to 256
            tokens.
        w: ``[N, K/R]``, as in ``nn.Linear``, of x's dtype, its rows contiguous.
        bias: ``[N]``, the same on every rank; added once, after the sum.
        residual, norm, norm_weight, norm_bias, eps, scale, block_scales: As
            :func:`interlace.gemm_all_reduce` takes them; ``residual`` has the shape of the result.
        out_dtype: dtype of the normalised sum: float16, bfloat16, float32 or float8_e4m3fn;
            default: x's. Refused without a norm.
        group: 1 to 8 ranks of one node, or ranks of several nodes; default: the default process
            group.
        impl: The implementation, as of :func:`interlace.gemm_all_reduce`; ``"gemv"`` is the kernel
            that is made for few tokens.
        config: The kernel's protocol and tiles, as of :func:`interlace.gemm_all_reduce`.

    Returns:
        ``[N]`` or ``[B, N]``, of x's dtype, the same on every rank. With a norm, a
        :class:`interlace.Normed`: the normalised sum, the new residual (sum, bias and residual,
        rounded to x's dtype), and the scales of rows.

        Gradients, and where they come from, are those of :func:`interlace.gemm_all_reduce`.

    Raises:
        ArgumentError: Shapes, strides, dtypes or devices do not fit.
        RankMismatchError: Ranks differ in shapes, dtype, bias, impl or config; raised on every
            rank.
        GroupError: The group is too large.
        PeerTimeoutError: A peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its output with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> # [1, 8192/R], [4096, 8192/R] -> [1, 4096]
        >>> y = interlace.gemv_all_reduce(x_shard_k, w_shard_k)

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), "GEMV + AllReduce".
    """
    _require_tokens(x, w)
    is_vector = x.dim() == 1
    if is_vector:
        # A vector is one token.
        x, residual = x[None], residual if residual is None else residual[None]
    if norm is None and norm_weight is None:
        refuse_without_norm(
            "gemv_all_reduce",
            residual=residual, norm_bias=norm_bias, scale=scale, out_dtype=out_dtype,
            block_scales=block_scales or None,
        )  # fmt: skip
        y: torch.Tensor = schema.call(
            OPERATOR, x, w, bias, None, None, [], None, group, impl, cast(Any, config)
        )
        return y[0] if is_vector else y
    results = call_normed(
        x, w, bias, residual=residual, norm=norm, norm_weight=norm_weight, norm_bias=norm_bias,
        eps=eps, scale=scale, out_dtype=out_dtype, block_scales=block_scales, group=group,
            impl=impl, config=config,
    )  # fmt: skip
    return Normed(results.y[0], results.residual[0], results.scale) if is_vector else results


def _require_tokens(x: torch.Tensor, w: torch.Tensor) -> None:
    """Refuse operands that ``gemv_all_reduce`` does not take; what both functions refuse, the
    operator says.

    Raises:
        ArgumentError: x is no vector or matrix of a dtype that the kernel multiplies, or rows of w
            are not contiguous.
    """
    require_tensors("gemv_all_reduce", x=x, w=w)
    if x.dim() not in (1, 2):
        raise ArgumentError(f"gemv_all_reduce: x must be [K] or [B, K]; got shape {list(x.shape)}.")
    require_float("gemv_all_reduce: x", x.dtype)
    if w.dim() == 2 and w.stride(1) != 1 and w.shape[1] > 1 and w.shape[0] > 0:
        raise ArgumentError(
            f"gemv_all_reduce: rows of w must be contiguous; got strides {list(w.stride())}. "
            "Keep w as nn.Linear does, [N, K], or call .contiguous() once."
        )
