"""``interlace.all_gather_gemm``, as users call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist

from interlace.comm import default_name
from interlace.gemm.operands import output_dtype, validate
from interlace.gemm.splits import validate_list
from interlace.operators.all_gather_gemm.config import IMPLS, OPERATOR, AllGatherGemmConfig


@overload
def all_gather_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    splits: Sequence[int] | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: Literal[False] = False,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: AllGatherGemmConfig | None = None,
) -> torch.Tensor: ...


@overload
def all_gather_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    splits: Sequence[int] | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: Literal[True],
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: AllGatherGemmConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def all_gather_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    splits: Sequence[int] | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: AllGatherGemmConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """All-gather of rows and the matrix product with them, at once.

    ``y = all_gather(x) @ w.T + bias``: the column-parallel linear layer under sequence parallelism,
    its input sharded along tokens, its weight along N. The product begins with the rows that are
    here, while the peers' rows arrive.

    Dimensions: M rows (tokens) of all ranks, K inner, N columns of all ranks, R ranks.

    Products are summed in float32 and rounded once. Runs on the current stream, without
    synchronising the host; calls of one group on several streams are put in order.

    Args:
        x: ``[rows of this rank, K]``: float16, bfloat16, float32 or float8_e4m3fn. Other than
            contiguous rows are copied.
        w: ``[N/R, K]``, as in ``nn.Linear``, of x's dtype: contiguous along K, or along N (``.T``
            of a contiguous ``[K, N]``). An address or a stride that is no multiple of 16 bytes
            costs the fused kernel a copy in each call.
        bias: ``[N/R]`` of the result's dtype, this rank's part.
        splits: rows of x on each rank, the same list on every rank. Default: all ranks have as many
            as this one.
        x_scale: float32: what x's elements are to be multiplied by; needed with float8 and refused
            without. ``[]`` or ``[1]``, or one a row: ``[rows]`` or ``[rows, 1]``. Of this rank's
            rows: every rank has its own.
        w_scale: the same for w: ``[]`` or ``[1]``, or one a row: ``[N/R]`` or ``[1, N/R]``.
        out_dtype: of the result: float16, bfloat16 or float32; default: x's, and bfloat16 for
            float8.
        return_gathered: whether to return the gathered x too; ranks may differ in it. It is a
            constant to autograd: gradients reach x through the product.
        group: 1 to 8 ranks of one machine; default: the default process group.
        impl: ``"fused"``, ``"chunked"`` (``torch.mm`` for each rank's rows once copy engines have
            brought them), ``"pushed"`` (one kernel stores rows in all ranks' memory, then
            ``torch.mm``: for few rows; these two not for float8, nor for another ``out_dtype``),
            ``"unfused"`` (``all_gather``, then ``F.linear``), or ``"auto"``: what was measured to
            be faster; :func:`interlace.explain` says which and why. An explicit choice is never
            replaced.
        config: how the fused kernel cuts its work; default: from the tuned table. The same on every
            rank.

    Returns:
        ``[M, N/R]`` of ``out_dtype``, rows in rank order; with ``return_gathered`` a pair, ``[M,
        K]`` of x's dtype beside it.

        Gradients, of which every rank must run the backward pass: ``grad_x =
        gemm_reduce_scatter(grad, w.T)`` (fused too), ``grad_w = grad.T @ gathered x``, for which
        the gathered x is kept from the forward pass, M K elements; bias gets the sum of ``grad``
        over rows.

    Raises:
        ArgumentError: shapes, strides, dtypes, devices or splits do not fit; or float8 operands
            require gradients.
        RankMismatchError: ranks differ in rows, shapes, dtypes, bias, splits, impl or config;
            raised on every rank.
        GroupError: the group is too large or spans machines.
        BackendError: float8 on a GPU without it (compute capability below 8.9).
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its output with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> y = interlace.all_gather_gemm(x_shard_m, w_shard_n)  # [4096/R, 4096], [14336/R, 4096] -> [4096, 14336/R]

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), for the fusion; Korthikanti et al.
    (arXiv:2205.05198) for sequence parallelism.
    """
    validate(
        OPERATOR, x, w, bias, x_scale, w_scale, out_dtype, impl, config, AllGatherGemmConfig, IMPLS
    )
    validate_list(OPERATOR, "splits", splits)
    y, gathered = torch.ops.interlace.all_gather_gemm(
        x,
        w,
        bias,
        x_scale,
        w_scale,
        None if splits is None else list(splits),
        output_dtype(x, out_dtype),
        return_gathered or (torch.is_grad_enabled() and w.requires_grad),
        default_name(group),
        impl,
        "" if config is None else str(config),
    )
    return (y, gathered.detach()) if return_gathered else y
