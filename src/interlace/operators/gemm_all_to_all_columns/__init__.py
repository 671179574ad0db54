"""GEMM + All-to-All along columns: the QKV product of sequence parallelism by Ulysses; see
README.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import default_name
from interlace.comm.groups.registration import (
    OPERATOR_TAGS,
    entrance,
    once_differentiable,
    register,
)
from interlace.errors import ArgumentError
from interlace.gemm.config import GemmConfig
from interlace.gemm.dispatch import group_for, recall_key
from interlace.gemm.operands import Operands, validate
from interlace.gemm.sequence import (
    ColumnRanges,
    Ranges,
    SequenceCall,
    SequenceOperator,
    check_ranges,
    column_count,
    contiguous_ranges,
    flat_ranges,
    no_memory,
    ranges_of,
    validate_ranges,
)
from interlace.gemm.sequence import qkv_column_ranges as qkv_column_ranges
from interlace.gemm.sequence_dispatch import run
from interlace.gemm.splits import balanced, check_sum, rank_in, ranks_of, validated_list
from interlace.operators.gemm_all_to_all_columns import fused, reference
from interlace.operators.gemm_all_to_all_columns.layout import segments_of
from interlace.registry import Implementation, operator

_LEAST_BLOCK_N = 64
"""Columns of a tile below which ranges of columns rather end within a tile."""


@dataclasses.dataclass(frozen=True)
class GemmAllToAllColumnsConfig(GemmConfig):
    """One way to run the fused kernel of ``gemm_all_to_all_columns``; see :class:`GemmConfig` for
    the fields. ``group_m`` is also the number of tiles for one rank before the next rank's turn;
    ``interleave`` means nothing.
    """


@operator
class GemmAllToAllColumns(SequenceOperator):
    """``x @ w.T + bias`` of this rank's rows, whose columns go to the ranks that own them."""

    collective = "all_to_all_columns"
    alike = "gemm_all_to_all"
    config_type = GemmAllToAllColumnsConfig
    implementations = (
        Implementation(
            "fused",
            "one kernel that sends tiles as it computes them",
            fused.run,
            schedule="tiled",
            reservation=fused.reservation,
            is_batch_invariant=True,
        ),
        Implementation(
            "unfused",
            "F.linear, a permute of its columns, and all_to_all_single",
            reference.gemm_all_to_all_columns,
            spans_nodes=True,
            alias="nccl",
            reservation=no_memory,
        ),
    )

    def excess(
        self,
        operands: Operands,
        rows: Sequence[int],
        columns: Ranges,
        rank: int,
        world_size: int,
    ) -> dict[str, int]:
        """Return by how much this rank's x has more rows than the list says."""
        expected = rows[rank] if len(rows) == world_size else operands.rows
        return {"rows_of_x_beyond_their_split": operands.rows - expected}

    def check(
        self,
        operands: Operands,
        rows: Sequence[int],
        columns: Ranges,
        rank: int | None,
        world_size: int,
    ) -> None:
        """Refuse lists that fit neither the operands nor the group."""
        check_sum(f"{self.name}: splits", rows, world_size, None, "")
        check_ranges(self.name, columns, operands.columns, world_size)
        if rank is not None and operands.rows != rows[rank]:
            raise ArgumentError(
                f"{self.name}: x must have as many rows as splits say, {rows[rank]} on rank "
                f"{rank}; got {operands.rows}."
            )

    def fitted(self, config: GemmConfig, columns: ColumnRanges) -> GemmConfig:
        """Return a configuration with tiles of which the ranges of columns consist, unless those
        would be too small.
        """
        counts = (end - first for first, end, _ in segments_of(columns))
        block_n = math.gcd(config.block_n, *counts)
        if block_n < min(config.block_n, _LEAST_BLOCK_N):
            return config
        return dataclasses.replace(config, block_n=block_n)

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name."""
        return ("x", "w"), ("bias", "column_ranges", "splits")

    def sized(  # type: ignore[override]
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        world_size: int,
        bias: torch.Tensor | None = None,
        column_ranges: ColumnRanges | None = None,
        splits: Sequence[int] | None = None,
    ) -> SequenceCall:
        """Return a call of these sizes; x may be any rank's."""
        _validate(x, w, bias, "auto", None)
        columns = _columns(w, _flat(column_ranges), world_size)
        operands = Operands(x, w, bias, None, None, x.dtype)
        rows = _rows(x, validated_list(self.name, "splits", splits), world_size)
        return self.sized_call(operands, rows, columns, world_size)


_DECLARATION = GemmAllToAllColumns()
NAME = _DECLARATION.name


def _validate(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    impl: str,
    config: object,
) -> None:
    """Refuse operands and options that no rank could compute with."""
    validate(_DECLARATION, x, w, bias, None, None, None, impl, config, takes_float8=False)


def gemm_all_to_all_columns(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    column_ranges: ColumnRanges | None = None,
    splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: GemmAllToAllColumnsConfig | None = None,
) -> torch.Tensor:
    """Multiply this rank's rows, and send each column of the product to the ranks that own it.

    The first half of Ulysses' sequence parallelism: x is sharded along the sequence, and the QKV
    product's columns go to the ranks that own their heads, so that each rank has the whole sequence
    of its heads. While some programs still multiply, others' tiles are on their way, straight to
    their place in the owner's result.

    Dimensions: S_s rows of the sequence on rank s, S of all ranks, K inner, N columns, N_d of them
    on rank d, R ranks. With a batch, rows are ``[S_s, batch]`` flattened, the sequence first.

    Products are summed in float32 along K and rounded once. Runs on the current stream, without
    synchronising the host.

    Args:
        x: ``[S_s, K]``: float16, bfloat16 or float32. Other than contiguous rows are copied.
        w: ``[N, K]``, as in ``nn.Linear``, of x's dtype: contiguous along K, or along N, the same
            on every rank.
        bias: ``[N]`` of x's dtype, the same on every rank.
        column_ranges: For each rank the columns that it gets, as ranges ``(first, end)`` in the
            order in which its result has them; the same on every rank. Several ranks may get the
            same column, which is computed once; some columns may go to none.
            :func:`interlace.qkv_column_ranges` returns those of a fused QKV product. Default: N
            columns in the order of ranks, shared out as evenly as by ``torch.tensor_split``.
        splits: Rows of x on each rank, the same list on every rank. Default: all ranks have as many
            as this one.
        group: 1 to 8 ranks of one node, or ranks of several nodes, for which ``"unfused"`` runs;
            default: the default process group.
        impl: ``"fused"``; ``"unfused"`` or ``"nccl"``: ``F.linear``, a permute of its columns, and
            ``all_to_all_single``; or ``"auto"``: what a tuned table has near these
            sizes; without, the one whose time is predicted to be shorter, as of
            ``gemm_all_to_all``.
            ``"batch_invariant"`` gives a row the same bits in every batch
            (:func:`interlace.batch_invariant`).
        config: The fused kernel's configuration, the same on every rank; default: the tuned
            table's, or the largest tiles that fit.

    Returns:
        ``[S, N_d]`` of x's dtype: the rows of all ranks in their order, this rank's columns.

        Gradients, of which every rank must run the backward pass: the gradients of this rank's rows
        come back and are multiplied by w, which is :func:`interlace.all_to_all_gemm`; the weight's
        gradient is a product of what has come back. Gradients of w and bias are those of this
        rank's rows. There are no second derivatives.

        The fused kernel's result lies in the group's symmetric memory. If another stream reads it,
        keep it until this one has waited for that; ``record_stream`` does nothing here.

    Raises:
        ArgumentError: shapes, strides, dtypes, devices, ranges or splits do not fit.
        RankMismatchError: ranks differ in the shape of w, dtype, bias, ranges, splits, impl or
            config; raised on every rank.
        GroupError: the group is too large.
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its result with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> # 4 ranks, 32 query heads, 8 key and value heads of 128 columns; x [2048, 4096]
        >>> ranges = interlace.qkv_column_ranges(32, 8, 128, 4)
        >>> qkv = interlace.gemm_all_to_all_columns(x, w_qkv, column_ranges=ranges)  # [8192, 1536]
        >>> q, k, v = qkv.split([1024, 256, 256], 1)

    Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
    """
    _validate(x, w, bias, impl, config)
    lists = validated_list(NAME, "splits", splits)
    # A schema has no type for configurations, so graphs hold their text.
    text = "" if config is None else str(config)
    y: torch.Tensor = entrance(NAME)(
        x, w, bias, _flat(column_ranges), lists, default_name(group), impl, text
    )
    return y


_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    f"{NAME}(Tensor x, Tensor w, Tensor? bias, int[]? column_ranges, SymInt[]? splits, "
    "str group_name, str impl, str config) -> Tensor",
    tags=OPERATOR_TAGS,
)
_OTHERS = 5  # arguments that are no tensors


def _rows(x: torch.Tensor, splits: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """Return the rows of x on each rank."""
    return (x.shape[0],) * world_size if splits is None else tuple(splits)


def _flat(column_ranges: ColumnRanges | None) -> list[int] | None:
    """Return ranges as the schema holds them, once they are such.

    Raises:
        ArgumentError: They are no lists of ranges.
    """
    return None if column_ranges is None else flat_ranges(validate_ranges(NAME, column_ranges))


def _columns(w: torch.Tensor, column_ranges: Sequence[int] | None, world_size: int) -> Ranges:
    """Return the columns of each rank."""
    if column_ranges is None:
        return contiguous_ranges(balanced(w.shape[0], world_size))
    return ranges_of(tuple(column_ranges))


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    column_ranges: Sequence[int] | None,
    splits: Sequence[int] | None,
    group_name: str,
    impl: str,
    config: str,
) -> torch.Tensor:
    group = group_for(NAME, group_name, x.device)
    known = recall_key(NAME, (x, w, bias), column_ranges, splits, impl, config)
    y: torch.Tensor | None = None if known is None else group.recall(known)
    if y is None:
        operands = Operands(x, w, bias, None, None, x.dtype)
        rows = _rows(x, splits, group.world_size)
        columns = _columns(w, column_ranges, group.world_size)
        y = run(
            _DECLARATION, operands, rows, columns, False, group, group_name, impl, config, known
        )
    return y


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    column_ranges: Sequence[int] | None,
    splits: Sequence[int] | None,
    group_name: str,
    impl: str,
    config: str,
) -> torch.Tensor:
    rank, world_size = rank_in(group_name)
    columns = _columns(w, column_ranges, world_size)
    check_ranges(NAME, columns, w.shape[0], world_size)
    return x.new_empty([sum(_rows(x, splits, world_size)), column_count(columns[rank])])


def _set_up_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, bias, column_ranges, ctx.splits, ctx.group_name, ctx.impl, _ = inputs
    ctx.by_rank = _columns(w, column_ranges, ranks_of(ctx.group_name, x.device))
    ctx.columns, ctx.has_bias, ctx.rows = len(w), bias is not None, len(x)
    # The weight also where x needs no gradient: ranks exchange in either case.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)


@once_differentiable(NAME)
def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Let the gradients of this rank's rows come back, and multiply them: the other operator.

    Columns that several ranks have got come back several times: their rows of the weight are there
    as often, so that the product adds them up.
    """
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
    sent = [column_range for ranges in ctx.by_rank for column_range in ranges]
    is_in_order = [*_joined(sent)] == [(0, ctx.columns)]
    weight = w if is_in_order else torch.cat([w[a:b] for a, b in sent] or [w[:0]])
    needs_columns = needs_w or (needs_bias and ctx.has_bias)
    grad_x, returned = entrance("all_to_all_gemm")(
        grad,
        weight.T,
        None,
        [column_count(ranges) for ranges in ctx.by_rank],
        ctx.splits,
        needs_columns,
        ctx.group_name,
        ctx.impl,
        "",
    )
    grad_w = grad_bias = None
    if needs_columns:
        columns = returned
        if not is_in_order:
            columns, start = returned.new_zeros(ctx.rows, ctx.columns), 0
            for first, end in sent:
                columns[:, first:end] += returned[:, start : start + end - first]
                start += end - first
        grad_w = columns.T @ x if needs_w else None
        grad_bias = columns.sum(0) if needs_bias and ctx.has_bias else None
    return grad_x if needs_x else None, grad_w, grad_bias, *[None] * _OTHERS


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges with those in one that follow each other."""
    joined: list[tuple[int, int]] = []
    for first, end in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return joined


register(_library, NAME, _run, _fake, backward=_backward, setup_context=_set_up_backward)
