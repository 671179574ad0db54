"""All-to-All + GEMM: the output product of Ulysses' sequence parallelism; see README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

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
from interlace.gemm.dispatch import group_for, recall_key
from interlace.gemm.operands import (
    Operands,
    contiguous_dimension,
    require_bias,
    require_float,
    require_kind,
    require_tensors,
)
from interlace.gemm.sequence import (
    Ranges,
    SequenceCall,
    SequenceOperator,
    column_count,
    contiguous_ranges,
    flat_ranges,
    no_memory,
)
from interlace.gemm.sequence_dispatch import run
from interlace.gemm.splits import check_sum, rank_in, ranks_of, validated_list
from interlace.operators.all_to_all_gemm import fused, reference
from interlace.operators.all_to_all_gemm.fused import AllToAllGemmConfig as AllToAllGemmConfig
from interlace.registry import Implementation, operator

Pair = tuple[torch.Tensor, torch.Tensor]


@operator
class AllToAllGemm(SequenceOperator):
    """``gathered @ w.T + bias``: this rank's rows, of which every rank had some columns."""

    collective = "all_to_all"
    alike = "all_gather_gemm"
    collective_first = True
    config_type = AllToAllGemmConfig
    implementations = (
        Implementation(
            "fused",
            "one kernel that multiplies blocks of rows as programs of the peers send them",
            fused.run,
            schedule="tiled",
            reservation=fused.reservation,
            is_batch_invariant=True,
        ),
        Implementation(
            "unfused",
            "all_to_all_single, a permute of the columns, and F.linear",
            reference.all_to_all_gemm,
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
        """Return by how much this rank's x has more rows and columns than the lists say."""
        is_fit = len(columns) == world_size
        expected = column_count(columns[rank]) if is_fit else operands.inner
        return {
            "rows_of_x_beyond_the_splits": operands.rows - sum(rows),
            "columns_of_x_beyond_their_split": operands.inner - expected,
        }

    def check(
        self,
        operands: Operands,
        rows: Sequence[int],
        columns: Ranges,
        rank: int | None,
        world_size: int,
    ) -> None:
        """Refuse lists that fit neither the operands nor the group."""
        counts = list(map(column_count, columns))
        check_sum(f"{self.name}: splits", rows, world_size, None, "")
        check_sum(f"{self.name}: column_splits", counts, world_size, None, "")
        if sum(rows) != operands.rows:
            if len(set(rows)) == 1 and operands.rows // world_size == rows[0]:
                raise ArgumentError(
                    f"{self.name}: rows of x must divide evenly over {world_size} ranks unless "
                    f"splits are given; got {operands.rows}. Pass splits."
                )
            raise ArgumentError(
                f"{self.name}: splits must sum to the rows of x, {operands.rows}; got {list(rows)}."
            )
        if rank is not None and counts[rank] != operands.inner:
            raise ArgumentError(
                f"{self.name}: x must have as many columns as column_splits say, {counts[rank]} on "
                f"rank {rank}; got {operands.inner}."
            )
        if sum(counts) != operands.w.shape[1]:
            raise ArgumentError(
                f"{self.name}: w must be [N, K] with K = {sum(counts)}, the columns of x on all "
                f"ranks; got shape {list(operands.w.shape)}. Pass column_splits if ranks have "
                "different numbers of columns."
            )

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name."""
        return ("x", "w"), ("bias", "column_splits", "splits")

    def sized(  # type: ignore[override]
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        world_size: int,
        bias: torch.Tensor | None = None,
        column_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> SequenceCall:
        """Return a call of these sizes; x may be any rank's."""
        column_list, row_list = _validated(x, w, bias, column_splits, splits)
        operands = Operands(x, w, bias, None, None, x.dtype)
        rows, columns = _rows(x, row_list, world_size), _columns(x, column_list, world_size)
        return self.sized_call(operands, rows, columns, world_size)


_DECLARATION = AllToAllGemm()
NAME = _DECLARATION.name


def _validated(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    column_splits: object,
    splits: object,
) -> tuple[list[int] | None, list[int] | None]:
    """Refuse operands that no rank could multiply, and return both lists with Python's integers.

    Raises:
        ArgumentError: One of them is such.
    """
    require_tensors(NAME, x=x, w=w)
    require_float(f"{NAME}: x", x.dtype)
    if x.dim() != 2 or w.dim() != 2:
        raise ArgumentError(
            f"{NAME}: x must be [S, K_d] and w [N, K]; got shapes {list(x.shape)} and "
            f"{list(w.shape)}. Flatten leading dimensions first."
        )
    require_kind(f"{NAME}: w", w, x.dtype, x.device, "x")
    if contiguous_dimension(w) is None:
        raise ArgumentError(
            f"{NAME}: w must be contiguous along K or along N; got strides {list(w.stride())}. "
            "Call .contiguous() once."
        )
    if bias is not None:
        require_bias(f"{NAME}: bias", bias, w, x.dtype, "x")
    return (
        validated_list(NAME, "column_splits", column_splits),
        validated_list(NAME, "splits", splits),
    )


@overload
def all_to_all_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    column_splits: Sequence[int] | None = None,
    splits: Sequence[int] | None = None,
    return_gathered: Literal[False] = False,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: AllToAllGemmConfig | None = None,
) -> torch.Tensor: ...


@overload
def all_to_all_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    column_splits: Sequence[int] | None = None,
    splits: Sequence[int] | None = None,
    return_gathered: Literal[True],
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: AllToAllGemmConfig | None = None,
) -> Pair: ...


def all_to_all_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    column_splits: Sequence[int] | None = None,
    splits: Sequence[int] | None = None,
    return_gathered: bool = False,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: AllToAllGemmConfig | None = None,
) -> torch.Tensor | Pair:
    """Bring each row's columns from all ranks to the rank that owns the row, and multiply it there.

    The second half of Ulysses' sequence parallelism: attention has left each rank the whole
    sequence of its heads, and the output product needs all heads of this rank's part of the
    sequence. Rows are multiplied in blocks as their columns arrive.

    Dimensions: S rows of the sequence, S_s of them on rank s, K_d columns of x on rank d, K of all
    ranks, N columns of the product, R ranks. With a batch, rows are ``[S, batch]`` flattened, the
    sequence first.

    Products are summed in float32 along K, in the order of ranks on every rank, and rounded once.
    Runs on the current stream, without synchronising the host.

    Args:
        x: ``[S, K_d]``: this rank's columns (its heads) of all rows; float16, bfloat16 or float32.
            Other than contiguous rows are copied.
        w: ``[N, K]``, as in ``nn.Linear``, of x's dtype: its columns in the order of the ranks that
            have them; contiguous along K, or along N, the same on every rank.
        bias: ``[N]`` of x's dtype, the same on every rank.
        column_splits: Columns of x on each rank, the same list on every rank. Default: all ranks
            have as many as this one.
        splits: Rows of the sequence on each rank, the same list on every rank. Default: S is split
            evenly, and then R must divide it.
        return_gathered: Whether to return the gathered x too; ranks may differ in it. It is a
            constant to autograd: gradients reach x through the product.
        group: 1 to 8 ranks of one node, or ranks of several nodes, for which ``"unfused"`` runs;
            default: the default process group.
        impl: ``"fused"``; ``"unfused"`` or ``"nccl"``: ``all_to_all_single``, a permute of the
            columns, and ``F.linear``; or ``"auto"``: what a tuned table has near these
            sizes; without, the one whose time is predicted to be shorter, as of
            ``all_gather_gemm``.
            ``"batch_invariant"`` gives a row the same bits in every batch
            (:func:`interlace.batch_invariant`).
        config: The fused kernel's configuration, the same on every rank; default: the tuned
            table's, or the largest tiles that fit.

    Returns:
        ``[S_s, N]`` of x's dtype, this rank's rows; with ``return_gathered`` a pair, ``[S_s, K]``
        beside it, in the group's symmetric memory.

        Gradients, of which every rank must run the backward pass: ``grad @ w``, whose columns go
        back to their ranks, is :func:`interlace.gemm_all_to_all_columns`; ``grad_w = grad.T @
        gathered x``, for which the gathered x is kept from the forward pass, S_s K elements.
        Gradients of w and bias are those of this rank's rows. There are no second derivatives.

    Raises:
        ArgumentError: shapes, strides, dtypes, devices or splits do not fit.
        RankMismatchError: ranks differ in the shape of w, dtype, bias, splits, impl or config;
            raised on every rank.
        GroupError: the group is too large.
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its results with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> # 4 ranks, 32 heads of 128 columns; attention [8192, 1024], w_out [4096, 4096]
        >>> y = interlace.all_to_all_gemm(attention, w_out)  # [2048, 4096]

    Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
    """
    lists = _validated(x, w, bias, column_splits, splits)
    _DECLARATION.validate_options(impl, config)
    gather = return_gathered or (torch.is_grad_enabled() and w.requires_grad)
    # A schema has no type for configurations, so graphs hold their text.
    text = "" if config is None else str(config)
    y, gathered = entrance(NAME)(x, w, bias, *lists, gather, default_name(group), impl, text)
    return (y, gathered.detach()) if return_gathered else y


_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    f"{NAME}(Tensor x, Tensor w, Tensor? bias, SymInt[]? column_splits, SymInt[]? splits, "
    "bool gather, str group_name, str impl, str config) -> (Tensor, Tensor)",
    tags=OPERATOR_TAGS,
)
_OTHERS = 6  # arguments that are no tensors


def _rows(x: torch.Tensor, splits: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """Return the rows of the result on each rank."""
    return (x.shape[0] // world_size,) * world_size if splits is None else tuple(splits)


def _columns(x: torch.Tensor, column_splits: Sequence[int] | None, world_size: int) -> Ranges:
    """Return the columns of the gathered x that each rank has."""
    return contiguous_ranges([x.shape[1]] * world_size if column_splits is None else column_splits)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    column_splits: Sequence[int] | None,
    splits: Sequence[int] | None,
    gather: bool,
    group_name: str,
    impl: str,
    config: str,
) -> Pair:
    group = group_for(NAME, group_name, x.device)
    known = recall_key(NAME, (x, w, bias), column_splits, splits, gather, impl, config)
    pair: Pair | None = None if known is None else group.recall(known)
    if pair is None:
        operands = Operands(x, w, bias, None, None, x.dtype)
        rows = _rows(x, splits, group.world_size)
        columns = _columns(x, column_splits, group.world_size)
        pair = run(
            _DECLARATION, operands, rows, columns, gather, group, group_name, impl, config, known
        )
    return pair


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    column_splits: Sequence[int] | None,
    splits: Sequence[int] | None,
    gather: bool,
    group_name: str,
    impl: str,
    config: str,
) -> Pair:
    rank, world_size = rank_in(group_name)
    rows = _rows(x, splits, world_size)[rank]
    return x.new_empty([rows, w.shape[0]]), x.new_empty([rows if gather else 0, w.shape[1]])


def _set_up_backward(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    x, w, bias, column_splits, ctx.splits, gather, ctx.group_name, ctx.impl, _ = inputs
    gathered = output[1]
    ctx.columns = _columns(x, column_splits, ranks_of(ctx.group_name, x.device))
    if ctx.needs_input_grad[1] and not gather:
        raise ArgumentError(f"{NAME}: gather must be True where w requires a gradient; got False.")
    ctx.mark_non_differentiable(gathered)
    ctx.set_materialize_grads(False)
    ctx.has_bias = bias is not None
    ctx.save_for_backward(gathered if ctx.needs_input_grad[1] else None, w)


@once_differentiable(NAME)
def _backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    """Send the columns of x's gradient back to their ranks, as they are computed: the other
    operator.
    """
    gathered, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias, *_others = ctx.needs_input_grad
    grad_x = grad_w = grad_bias = None
    if grad is not None:
        if needs_x:
            grad_x = entrance("gemm_all_to_all_columns")(
                grad,
                w.T,
                None,
                flat_ranges(ctx.columns),
                ctx.splits,
                ctx.group_name,
                ctx.impl,
                "",
            )
        grad_w = grad.T @ gathered if needs_w else None
        grad_bias = grad.sum(0) if needs_bias and ctx.has_bias else None
    return grad_x, grad_w, grad_bias, *[None] * _OTHERS


register(_library, NAME, _run, _fake, backward=_backward, setup_context=_set_up_backward)
