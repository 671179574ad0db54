"""``interlace.gemm_all_to_all``, as users call it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.comm import default_name
from interlace.errors import ArgumentError
from interlace.gemm.choice import IMPLS
from interlace.gemm.operands import output_dtype, validate
from interlace.gemm.splits import validate_list
from interlace.operators.gemm_all_to_all.config import OPERATOR, GemmAllToAllConfig


def gemm_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: GemmAllToAllConfig | None = None,
) -> torch.Tensor:
    """Matrix product and the all-to-all of its rows, in one kernel.

    ``all_to_all_single(x @ w.T + bias)``: an expert's second product and the combine that sends
    each row back to its token's owner. While some programs still multiply, others' tiles are on
    their way, straight to their place in the owner's result.

    Dimensions: M rows of x on this rank, K inner, N columns, R ranks.

    Products are summed in float32 and rounded once. Runs on the current stream, without
    synchronising the host; calls of one group on several streams are put in order.

    Args:
        x: ``[M, K]``: float16, bfloat16, float32 or float8_e4m3fn. Rows for rank 0 first, then
            those for rank 1, and so on. Other than contiguous rows are copied.
        w: ``[N, K]``, as in ``nn.Linear``, of x's dtype: contiguous along K, or along N (``.T`` of
            a contiguous ``[K, N]``). An address or a stride that is no multiple of 16 bytes costs
            the fused kernel a copy in each call.
        bias: ``[N]`` of the result's dtype; added by the rank that computes a row.
        input_splits: rows of x for each rank; they sum to M. Default: M split evenly, and then R
            must divide M.
        output_splits: rows from each rank. Both lists are given or neither, and ``input_splits[d]``
            on rank s must be ``output_splits[s]`` on rank d. Lists are compared on the host in each
            call; even splits, once.
        x_scale: float32: what x's elements are to be multiplied by; needed with float8 and refused
            without. ``[]`` or ``[1]``, or one a row: ``[M]`` or ``[M, 1]``.
        w_scale: the same for w: ``[]`` or ``[1]``, or one a row: ``[N]`` or ``[1, N]``.
        out_dtype: of the result: float16, bfloat16 or float32; default: x's, and bfloat16 for
            float8.
        group: 1 to 8 ranks of one machine; default: the default process group.
        impl: ``"fused"``, ``"remote_stores"`` (``torch.mm``, with the peers' memory as its output; rows
            split evenly, no bias), ``"chunked"`` (``torch.mm`` for each rank's rows, and copy engines
            that take them; rows split evenly), ``"triggered"`` (a kernel that counts its tiles, and
            copy engines; rows split evenly), ``"unfused"`` (``F.linear``, then
            ``all_to_all_single``), or ``"auto"``: which of these was measured to be the fastest;
            :func:`interlace.explain` says which and why. An explicit choice is never replaced.
        config: how the fused kernel cuts its work; default: from the tuned table. The same on every
            rank.

    Returns:
        ``[sum(output_splits), N]`` of ``out_dtype``: rows in the order of the ranks that they come
        from. Where any rank's result requires a gradient every rank must run the backward pass: its
        gradient goes back by an all-to-all.

        The fused kernel's result lies in the group's symmetric memory. If another stream reads it,
        keep it until this one has waited for that; ``record_stream`` does nothing here, as the
        memory is not torch's.

    Raises:
        ArgumentError: shapes, strides, dtypes, devices or splits do not fit; or float8 operands
            require gradients.
        RankMismatchError: ranks differ in the shape of w, dtypes, bias, impl or config, or in what
            they send and expect; raised on every rank.
        GroupError: the group is too large or spans machines.
        BackendError: float8 on a GPU without it (compute capability below 8.9).
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its output with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> # four ranks, 1024 rows each
        >>> y = interlace.gemm_all_to_all(x, w)  # [1024, 2048], [8192, 2048] -> [1024, 8192]: 256 rows from each rank

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), "GEMM + All-to-All".
    """
    validate(
        OPERATOR, x, w, bias, x_scale, w_scale, out_dtype, impl, config, GemmAllToAllConfig, IMPLS
    )
    validate_splits(input_splits, output_splits)
    y: torch.Tensor = torch.ops.interlace.gemm_all_to_all(
        x,
        w,
        bias,
        x_scale,
        w_scale,
        None if input_splits is None else list(input_splits),
        None if output_splits is None else list(output_splits),
        output_dtype(x, out_dtype),
        default_name(group),
        impl,
        "" if config is None else str(config),
    )
    return y


def validate_splits(input_splits: object, output_splits: object) -> None:
    """Refuse what are no lists of rows, and one list without the other.

    Raises:
        ArgumentError: as said.
    """
    for name, splits in (("input_splits", input_splits), ("output_splits", output_splits)):
        validate_list(OPERATOR, name, splits)
    if (input_splits is None) != (output_splits is None):
        given, missing = ("input", "output") if output_splits is None else ("output", "input")
        raise ArgumentError(
            f"{OPERATOR}: input_splits and output_splits must be given together; got "
            f"{given}_splits only. "
            f"Pass {missing}_splits too, or neither for an even split."
        )
