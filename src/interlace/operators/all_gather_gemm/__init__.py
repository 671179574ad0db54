"""AllGather + GEMM: the column-parallel linear layer under sequence parallelism; see README.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from interlace.comm import Group
from interlace.comm.groups.registration import entrance
from interlace.errors import ArgumentError
from interlace.gemm import schema
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.config import GemmConfig
from interlace.gemm.gradients import save_operands
from interlace.gemm.implementations import network, two_levels
from interlace.gemm.implementations.fused import FUSED
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.implementations.stock import ASYNC_ALL_GATHER
from interlace.gemm.implementations.unfused import UNFUSED
from interlace.gemm.operands import FLOATS, Operands, require_tensor
from interlace.gemm.operator import GemmOperator, Splits
from interlace.gemm.splits import check_sum
from interlace.mapped.meeting import compare_once
from interlace.operators.all_gather_gemm import fused, reference
from interlace.registry import Implementation, operator
from interlace.tuning.configuration import between
from interlace.units import ceil_div


@dataclasses.dataclass(frozen=True)
class AllGatherGemmConfig(GemmConfig):
    """One way to run the fused kernel of ``all_gather_gemm``; see :class:`GemmConfig`."""

    group_m: int = between(16, 1, 1 << 20)


Pair = tuple[torch.Tensor, torch.Tensor]


@operator
class AllGatherGemm(GemmOperator):
    """``all_gather(x) @ w.T + bias``: all ranks' rows times this rank's columns."""

    collective = "all_gather"
    collective_first = True
    config_type = AllGatherGemmConfig
    returns_gathered = True
    implementations = (
        dataclasses.replace(
            FUSED,
            summary="one kernel that multiplies rows as copy engines bring them",
            run=fused.run,
            reservation=fused.staged_reservation,
            is_batch_invariant=True,
            reads_in_place=True,
        ),
        Implementation(
            "pushed",
            "one kernel stores rows in all ranks' memory, then a product",
            fused.run_pushed,
            # Values of 8 bits have none that could say that others have not come.
            needs(same_dtype=True, dtypes=FLOATS),
            is_batch_invariant=True,
            reservation=fused.pushed_reservation,
        ),
        network.across_nodes(
            Implementation(
                "chunked",
                "torch.mm for each rank's rows once copy engines have brought them",
                fused.run_chunked,
                needs(same_dtype=True),
                schedule="by_rank",
                reads_in_place=True,
                reservation=fused.staged_reservation,
            ),
            two_levels.run_all_gather,
            two_levels.needs_rails,
        ),
        UNFUSED,
        ASYNC_ALL_GATHER,
    )

    def agreed(self, operands: Operands, splits: Splits, group: Group) -> dict[str, Any]:
        """Return all ranks' rows, and whether x has as many as they say."""
        rows = self._by_rank(operands.rows, splits, group)
        expected = rows[group.rank] if len(rows) == group.world_size else operands.rows
        # Compared with the other arguments, so that a rank whose x does not fit its split stops
        # all of them.
        return {"rows_of_x_beyond_their_split": operands.rows - expected, "splits": rows}

    def plan_rows(self, rows: int, splits: Splits, group: Group) -> RowPlan:
        """Return each rank's rows: as given, or as many as this rank has."""
        by_rank = self._by_rank(rows, splits, group)
        check_sum(f"{self.name}: splits", by_rank, group.world_size, None, "")
        if rows != by_rank[group.rank]:
            raise ArgumentError(
                f"{self.name}: x must have as many rows as splits say, {by_rank[group.rank]} on "
                f"rank {group.rank}; got {rows}."
            )
        # The product has all ranks' rows, and so has each rank's result.
        total = sum(by_rank)
        return RowPlan(by_rank, (), total, total, total)

    def _by_rank(self, rows: int, splits: Splits, group: Group) -> tuple[int, ...]:
        (row_list,) = splits
        return (rows,) * group.world_size if row_list is None else tuple(row_list)

    def result_rows(self, rows: Any, splits: Splits, rank: int, world_size: int) -> Any:
        """Return all ranks' rows."""
        (row_list,) = splits
        return rows * world_size if row_list is None else sum(row_list)

    def product_rows(self, rows: int, splits: Splits, world_size: int) -> tuple[int, bool]:
        """Return all ranks' rows; no implementation minds how they are shared out."""
        (row_list,) = splits
        if row_list is None:
            return rows * world_size, True
        check_sum(f"{self.name}: splits", row_list, world_size, None, "the rows of x")
        return sum(row_list), True

    def run_empty(self, call: GemmCall) -> Pair:
        """Return the product without elements, and the gathered x, which may have some."""
        call.group.check()
        # The gathered x may have rows, which the stock collective would not compare.
        compare_once(call.group, call.family, self.name, call.operands.rows)
        return self.run_unfused(call)

    def run_unfused(self, call: GemmCall) -> Pair:
        """Run ``all_gather``, then ``F.linear``."""
        x = call.operands.x
        y, gathered = reference.all_gather_gemm(
            call.operands, call.rows.by_rank, call.process_group
        )
        if not call.gather:
            return y, x.new_empty([0, call.operands.inner])
        # PyTorch forbids an operator to return its argument.
        return y, gathered.clone() if gathered is x else gathered

    def candidates(self, start: GemmConfig, rows: int, world_size: int) -> list[GemmConfig]:
        """Return small tiles for few rows; else the start, also with narrower tiles."""
        if ceil_div(rows, world_size) < 128:
            return super().candidates(start, rows, world_size)
        # No program sends tiles here, so none need begin late.
        return [start, dataclasses.replace(start, block_n=128)]

    def set_up_backward(self, ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
        """Save the gathered x and w, as far as their gradients are needed."""
        _, w, bias, _, _, ctx.splits, _, gather, ctx.group_name, impl, _ = inputs
        is_uneven = ctx.splits is not None and len(set(ctx.splits)) > 1
        # Implementations that the gradient's operator does not have, or not for uneven rows, were
        # not asked for there.
        is_shared = impl in (*self.choosers, "fused", "unfused") or (
            impl == "chunked" and not is_uneven
        )
        ctx.impl = impl if is_shared else "auto"
        gathered = output[1]
        if ctx.needs_input_grad[1] and not gather:
            raise ArgumentError(
                f"{self.name}: gather must be True where w requires a gradient; got False."
            )
        if not gather:
            ctx.mark_non_differentiable(gathered)  # it has no rows
        ctx.set_materialize_grads(False)
        save_operands(ctx, gathered, w, bias)

    def backward(self, ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Sum x's gradient over the ranks while it is computed.

        Each rank's part of N gives a part of every row's gradient. The gathered x has a gradient in
        second derivatives only, where grad_w, which is a product with it, is differentiated.
        """
        grad, grad_gathered = grads
        gathered, w = ctx.saved_tensors
        grad_x = grad_w = grad_bias = None
        # Pairs whose products, summed over pairs and ranks, are the gradient of x.
        summands = []
        if grad is not None:
            rows = grad.to(ctx.dtype)
            if w is not None:
                summands.append((rows, w.T))
            grad_w = rows.mT @ gathered if gathered is not None else None
            grad_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if grad_gathered is not None and w is not None:
            identity = torch.eye(w.shape[1], dtype=w.dtype, device=w.device)
            summands.append((grad_gathered, identity))
        if summands:
            left, right = (
                summands[0]
                if len(summands) == 1
                else (torch.cat(factors, 1) for factors in zip(*summands, strict=True))
            )
            grad_x = entrance("gemm_reduce_scatter")(
                left, right, None, None, None, ctx.splits, ctx.dtype, ctx.group_name, ctx.impl, ""
            )
        return grad_x, grad_w, grad_bias


OPERATOR = schema.define(AllGatherGemm.name)


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
    """Gather all ranks' rows and multiply them by this rank's weight at once.

    ``y = all_gather(x) @ w.T + bias``: the column-parallel linear layer under sequence parallelism,
    its input sharded along tokens, its weight along N. The product begins with the rows that are
    here, while the peers' rows arrive.

    Dimensions: M rows (tokens) of all ranks, K inner, N columns of all ranks, R ranks.

    Products are summed in float32 and rounded once. Runs on the current stream, without
    synchronising the host; calls of one group on several streams are put in order.

    Args:
        x: ``[rows of this rank, K]``: float16, bfloat16, float32 or float8_e4m3fn. Other than
            contiguous rows are copied. Rows at one place of a symmetric tensor
            (:func:`interlace.empty_symmetric`) on every rank are not staged: peers fetch them where
            they are, if they are contiguous and address and length are multiples of 16 bytes
            (``"fused"`` and ``"chunked"``; no float8). What the stream runs behind the call may
            overwrite them.
        w: ``[N/R, K]``, as in ``nn.Linear``, of x's dtype: contiguous along K, or along N (``.T``
            of a contiguous ``[K, N]``), the same on every rank. An address or a stride that is no
            multiple of 16 bytes costs the fused kernel a copy in each call.
        bias: ``[N/R]`` of the result's dtype, this rank's part.
        splits: Rows of x on each rank, the same list on every rank. Default: all ranks have as many
            as this one.
        x_scale: float32: what x's elements are to be multiplied by; needed with float8 and refused
            without. ``[]`` or ``[1]``; one a row: ``[rows]`` or ``[rows, 1]``; or one for 128
            elements of a row: ``[rows, ceil(K / 128)]``. Of this rank's rows: every rank has its
            own.
        w_scale: The same for w: ``[]`` or ``[1]``; one a row: ``[N/R]`` or ``[1, N/R]``; or beside
            such scales of x one for 128 x 128 elements: ``[ceil(N/R / 128), ceil(K / 128)]``.
        out_dtype: Of the result: float16, bfloat16 or float32; default: x's, and bfloat16 for
            float8.
        return_gathered: Whether to return the gathered x too; ranks may differ in it. It is a
            constant to autograd: gradients reach x through the product.
        group: 1 to 8 ranks of one node, or ranks of several nodes, between which ``"chunked"``
            sends slices over the network and ``"unfused"`` takes any call; default: the default
            process group.
        impl: ``"fused"``, ``"chunked"`` (``torch.mm`` for each rank's rows once copy engines have
            brought them), ``"pushed"`` (one kernel stores rows in all ranks' memory, then a
            product: for few rows; these two not for float8, nor for another ``out_dtype``),
            ``"unfused"`` or ``"nccl"`` (``all_gather``, then ``F.linear``), and ``"async_tp"``,
            PyTorch's own pair on GPUs. ``"auto"`` is the one of these that is predicted to be the
            fastest; :func:`interlace.explain` says which and why. ``"measured"`` is the one that
            the first call of a kind measures to be the fastest (:func:`interlace.autotune`).
            ``"batch_invariant"`` gives a row the same bits in every batch
            (:func:`interlace.batch_invariant`). An explicit choice is never replaced.
        config: How the fused kernel cuts its work; default: from the tuned table. The same on every
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
        RankMismatchError: ranks differ in rows, shapes, dtypes, bias, splits, impl, config or the
            place of x in symmetric tensors; raised on every rank.
        GroupError: the group is too large.
        BackendError: float8 on a GPU without it (compute capability below 8.9).
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its output with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> # x_shard_m [4096/R, 4096], w_shard_n [14336/R, 4096], y [4096, 14336/R]
        >>> y = interlace.all_gather_gemm(x_shard_m, w_shard_n)

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), for the fusion; Korthikanti et al.
    (arXiv:2205.05198) for sequence parallelism.
    """
    require_tensor(f"{OPERATOR.name}: w", w)
    gather = return_gathered or (torch.is_grad_enabled() and w.requires_grad)
    y, gathered = schema.call(
        OPERATOR,
        x,
        w,
        bias,
        x_scale,
        w_scale,
        [splits],
        out_dtype,
        group,
        impl,
        config,
        gather=gather,
    )
    return (y, gathered.detach()) if return_gathered else y
