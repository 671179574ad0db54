"""``interlace.gemm_reduce_scatter``, as users call it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.comm import default_name
from interlace.gemm.choice import IMPLS
from interlace.gemm.operands import output_dtype, validate
from interlace.gemm.splits import validate_list
from interlace.operators.gemm_reduce_scatter.config import OPERATOR, GemmReduceScatterConfig


def gemm_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    splits: Sequence[int] | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: GemmReduceScatterConfig | None = None,
) -> torch.Tensor:
    """Matrix product and the reduce-scatter of its rows, in one kernel.

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
            of a contiguous ``[K, N]``). An address or a stride that is no multiple of 16 bytes
            costs the fused kernel a copy in each call.
        bias: ``[N]`` of the result's dtype, the same on every rank; added once, after the sum.
        splits: rows that each rank owns, the same list on every rank; they sum to M. Default: as
            ``torch.tensor_split``, the first ``M % R`` ranks one more than the others.
        x_scale: float32: what x's elements are to be multiplied by; needed with float8 and refused
            without. ``[]`` or ``[1]``, or one a row: ``[M]`` or ``[M, 1]``.
        w_scale: the same for w: ``[]`` or ``[1]``, or one a row: ``[N]`` or ``[1, N]``.
        out_dtype: of the result and of the parts that travel: float16, bfloat16 or float32;
            default: x's, and bfloat16 for float8.
        group: 1 to 8 ranks of one machine; default: the default process group.
        impl: ``"fused"``, ``"remote_stores"`` (``torch.mm``, with the peers' memory as its output; rows
            split evenly, no bias), ``"chunked"`` (``torch.mm`` for the peers' rows, copy engines that
            take them, and a kernel for this rank's own), ``"triggered"`` (a kernel that counts its
            tiles, and copy engines; rows split evenly), ``"unfused"`` (``F.linear``, then
            ``reduce_scatter``), or ``"auto"``: which of these was measured to be the fastest;
            :func:`interlace.explain` says which and why. An explicit choice is never replaced.
        config: how the fused kernel cuts its work; default: from the tuned table. The same on every
            rank.

    Returns:
        ``[splits[rank], N]`` of ``out_dtype``.

        Gradients, of which every rank must run the backward pass: ``grad_x, gathered =
        all_gather_gemm(grad, w.T)`` (fused too), ``grad_w = gathered.T @ x``; bias gets the sum of
        ``gathered`` over rows, the same on every rank.

    Raises:
        ArgumentError: shapes, strides, dtypes, devices or splits do not fit; or float8 operands
            require gradients.
        RankMismatchError: ranks differ in shapes, dtypes, bias, splits, impl or config; raised on
            every rank.
        GroupError: the group is too large or spans machines.
        BackendError: float8 on a GPU without it (compute capability below 8.9).
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its output with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> y = interlace.gemm_reduce_scatter(x_shard_k, w_shard_k)  # [4096, 8192/R], [4096, 8192/R] -> [4096/R, 4096]

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), for the fusion; Korthikanti et al.
    (arXiv:2205.05198) for sequence parallelism.
    """
    validate(
        OPERATOR,
        x,
        w,
        bias,
        x_scale,
        w_scale,
        out_dtype,
        impl,
        config,
        GemmReduceScatterConfig,
        IMPLS,
    )
    validate_list(OPERATOR, "splits", splits)
    y: torch.Tensor = torch.ops.interlace.gemm_reduce_scatter(
        x,
        w,
        bias,
        x_scale,
        w_scale,
        None if splits is None else list(splits),
        output_dtype(x, out_dtype),
        default_name(group),
        impl,
        "" if config is None else str(config),
    )
    return y
