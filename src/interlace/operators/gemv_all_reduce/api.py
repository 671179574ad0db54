"""``interlace.gemv_all_reduce``, as users call it."""

from __future__ import annotations

from typing import overload

import torch
import torch.distributed as dist

from interlace.comm import default_name
from interlace.comm.groups.registration import entrance
from interlace.gemm.epilogue import Norm, Normed, call_normed, refuse_without_norm
from interlace.operators.gemv_all_reduce.config import OPERATOR, GemvAllReduceConfig
from interlace.operators.gemv_all_reduce.operator import GemvAllReduce
from interlace.operators.gemv_all_reduce.validate import validate
from interlace.tuning.configuration import Configuration

_DECLARATION = GemvAllReduce()


@overload
def gemv_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: GemvAllReduceConfig | None = None,
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
    out_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: Configuration | None = None,
) -> torch.Tensor | Normed:
    """Multiply a matrix by a vector and all-reduce the result, in one kernel.

    ``y = sum over ranks r of x_r @ w_r.T, + bias``: the row-parallel linear layer of a
    Transformer's decoding step, its weight sharded along K. While some programs still multiply, the
    partial sums of others are on their way to the peers.

    The fused kernel's partial sums are float32 and are added in rank order, so its result is the
    same, bit by bit, on every rank and in every run. Runs on the current stream, without
    synchronising the host; calls of one group on several streams are put in order.

    Args:
        x: ``[K/R]`` or ``[B, K/R]``: float16, bfloat16 or float32; B is meant to be 1 to 256
            tokens.
        w: ``[N, K/R]``, as in ``nn.Linear``, of x's dtype, its rows contiguous.
        bias: ``[N]``, the same on every rank; added once, after the sum.
        residual: ``[B, N]`` of x's dtype, the same on every rank: added to the sum before the norm.
        norm: ``"rms"`` or ``"layer"``: the result is normalised over N, as what follows this layer
            in a Transformer; ``"rms"`` where ``norm_weight`` is given alone. No gradients then.
        norm_weight: ``[N]``, float16, bfloat16 or float32: what the normalised sum is multiplied
            by; None for 1.
        norm_bias: ``[N]``, the same: what is added to that; None for 0.
        eps: Is added to the mean square, or to the variance.
        scale: float32, one element, for ``out_dtype=torch.float8_e4m3fn``: the normalised sum is
            divided by it. Without it each row gets a scale of its own.
        out_dtype: dtype of the normalised sum: float16, bfloat16, float32 or float8_e4m3fn;
            default: x's.
        group: 1 to 8 ranks of one node, or ranks of several nodes; default: the default process
            group.
        impl: ``"fused"``; ``"unfused"`` (``F.linear``, then ``all_reduce``); ``"gemm"``, what
            :func:`interlace.gemm_all_reduce` takes, PyTorch's own pairs among it; ``"auto"``, the
            one that was measured for a table, or is predicted, to be the fastest;
            ``"measured"``, the one that the first call of a kind measures to be the fastest
            (:func:`interlace.autotune`); or ``"batch_invariant"``, the kernel in such a way that a
            token has the same bits in every batch (:func:`interlace.batch_invariant`).
            :func:`interlace.explain` says which and why. An explicit choice is never replaced.
        config: Protocol and tiles of the fused kernel; default: from the tuned table. It must be
            the same on every rank. With a norm, that of
            :mod:`interlace.operators.gemm_all_reduce_norm`.

    Returns:
        ``[N]`` or ``[B, N]``, of x's dtype, the same on every rank. With a norm, a
        :class:`interlace.Normed`: the normalised sum, the new residual (sum, bias and residual,
        rounded to x's dtype), and the scales of rows.

        Its gradient must be the same on every rank too, as it is when each rank goes on with the
        same computation: x gets ``grad @ w``, w gets ``grad.T @ x``, bias gets the sum of ``grad``
        over tokens, all without communication.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit.
        RankMismatchError: ranks differ in shapes, dtype, bias, impl or config; raised on every
            rank.
        GroupError: the group is too large.
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its output with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> # [1, 8192/R], [4096, 8192/R] -> [1, 4096]
        >>> y = interlace.gemv_all_reduce(x_shard_k, w_shard_k)

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), "GEMV + AllReduce".
    """
    validate(x, w, bias)
    if norm is not None or norm_weight is not None:
        # A vector is one token.
        matrix = x if x.dim() == 2 else x[None]
        y, total, scales = call_normed(
            _DECLARATION, matrix, w, bias,
            residual=residual if residual is None or x.dim() == 2 else residual[None], norm=norm,
            norm_weight=norm_weight, norm_bias=norm_bias, eps=eps, scale=scale,
            out_dtype=out_dtype, group=group, impl=impl, config=config,
        )  # fmt: skip
        shape = [*x.shape[:-1], w.shape[0]]
        return Normed(y.view(shape), total.view(shape), scales)
    refuse_without_norm(
        OPERATOR, residual=residual, norm_bias=norm_bias, scale=scale, out_dtype=out_dtype
    )
    _DECLARATION.validate_options(impl, config)
    text = "" if config is None else str(config)
    result: torch.Tensor = entrance("gemv_all_reduce")(x, w, bias, default_name(group), impl, text)
    return result
