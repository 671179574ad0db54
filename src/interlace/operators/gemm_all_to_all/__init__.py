"""GEMM + All-to-All: an expert's second product and the combine of its rows; see README.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import Group, process_group_named
from interlace.comm.groups.registration import OPERATOR_TAGS, entrance, register
from interlace.errors import ArgumentError, RankMismatchError
from interlace.gemm import schema
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.config import GemmConfig
from interlace.gemm.gradients import product_gradients, save_operands
from interlace.gemm.implementations import network
from interlace.gemm.implementations.chunked import CHUNKED
from interlace.gemm.implementations.fused import FUSED
from interlace.gemm.implementations.pushed import PUSHED_ALL_TO_ALL
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.implementations.unfused import UNFUSED
from interlace.gemm.operands import FLOATS, Operands
from interlace.gemm.operator import GemmOperator, Splits
from interlace.gemm.splits import balanced, check_sum
from interlace.operators.gemm_all_to_all import fused, reference
from interlace.registry import operator


@dataclasses.dataclass(frozen=True)
class GemmAllToAllConfig(GemmConfig):
    """One way to run the fused kernel of ``gemm_all_to_all``; see :class:`GemmConfig` for the
    fields.
    """


@operator
class GemmAllToAll(GemmOperator):
    """``all_to_all(x @ w.T + bias)``: the rows that all ranks have computed for this one."""

    collective = "all_to_all"
    config_type = GemmAllToAllConfig
    split_names = ("input_splits", "output_splits")
    implementations = (
        dataclasses.replace(
            FUSED, run=fused.run, is_batch_invariant=True, reservation=fused.reservation
        ),
        PUSHED_ALL_TO_ALL,
        network.across_nodes(
            CHUNKED,
            network.run_all_to_all,
            needs(even_rows=True, same_dtype=True, dtypes=FLOATS),
        ),
        UNFUSED,
    )

    def exchanges(self, splits: Splits) -> bool:
        """Return whether there are lists: one rank's may change while another's do not, and a rank
        that remembered its answer would not come to the exchange that the others need.
        """
        return splits[0] is not None

    def agreed(self, operands: Operands, splits: Splits, group: Group) -> dict[str, Any]:
        """Return the rows of an even split; lists are compared by :meth:`plan_rows`."""
        # Lists are not the same on every rank, so they cannot be compared here.
        even = f"even, of {operands.rows} rows"
        return {"splits": even if splits[0] is None else "given"}

    def plan_rows(self, rows: int, splits: Splits, group: Group) -> RowPlan:
        """Return the rows from every rank to every other, compared on all ranks.

        Raises:
            ArgumentError, RankMismatchError: On every rank, naming the one whose list is wrong.
        """
        ranks, (sends, receives) = group.world_size, splits
        if sends is None or receives is None:
            check_even(rows, ranks)
            sent = ((rows // ranks,) * ranks,) * ranks
        else:
            # All ranks check all lists, so that all of them raise the same error or none does.
            answers = group.exchange(f"{self.name} (splits)", [rows, list(sends), list(receives)])
            sent = self._check_lists(answers, ranks)
        # The choice goes by the rank that has most rows, so it is the same on every rank.
        return RowPlan(
            by_rank=(),
            sent=sent,
            result=sum(counts[group.rank] for counts in sent),
            product=max(map(sum, sent)),
            total=sum(map(sum, sent)),
        )

    def _check_lists(self, answers: list[Any], ranks: int) -> tuple[tuple[int, ...], ...]:
        """Return all ranks' lists of rows that they send, once they fit those that they receive."""
        for rank, (rows, sends, receives) in enumerate(answers):
            rank_name = f"on rank {rank}"
            check_sum(f"{self.name}: input_splits {rank_name}", sends, ranks, rows, "its rows of x")
            check_sum(f"{self.name}: output_splits {rank_name}", receives, ranks, None, "")
        for source, (_, sends, _) in enumerate(answers):
            for destination, (_, _, receives) in enumerate(answers):
                if sends[destination] != receives[source]:
                    raise RankMismatchError(
                        f"{self.name}: input_splits[{destination}] on rank {source} and "
                        f"output_splits[{source}] on rank {destination} must be equal; got "
                        f"{sends[destination]} and {receives[source]}. Nothing was computed."
                    )
        return tuple(tuple(sends) for _, sends, _ in answers)

    def result_rows(self, rows: Any, splits: Splits, rank: int, world_size: int) -> Any:
        """Return the rows that this rank receives."""
        return rows if splits[1] is None else sum(splits[1])

    def validated_splits(self, splits: Sequence[object]) -> list[list[int] | None]:
        """Refuse one list without the other, too."""
        lists = super().validated_splits(splits)
        if (splits[0] is None) != (splits[1] is None):
            present, absent = ("input", "output") if splits[1] is None else ("output", "input")
            raise ArgumentError(
                f"{self.name}: input_splits and output_splits must be given together; got "
                f"{present}_splits only. Pass {absent}_splits too, or neither for an even split."
            )
        return lists

    def product_rows(self, rows: int, splits: Splits, world_size: int) -> tuple[int, bool]:
        """Return this rank's rows, which stand for all ranks'."""
        sends, receives = splits
        if sends is None or receives is None:
            check_even(rows, world_size)
            return rows, True
        check_sum(f"{self.name}: input_splits", sends, world_size, rows, "the rows of x")
        check_sum(f"{self.name}: output_splits", receives, world_size, None, "the rows of x")
        return rows, len({*sends, *receives}) == 1

    def run_unfused(self, call: GemmCall) -> torch.Tensor:
        """Run ``F.linear``, then ``all_to_all_single``."""
        sent, rank = call.rows.sent, call.group.rank
        return reference.gemm_all_to_all(
            call.operands,
            sent[rank],
            [counts[rank] for counts in sent],
            call.process_group,
        )

    def candidates(self, start: GemmConfig, rows: int, world_size: int) -> list[GemmConfig]:
        """Return what every product has, and fewer rows of tiles together."""
        candidates = super().candidates(start, rows, world_size)
        if rows // world_size >= 128:
            candidates.append(dataclasses.replace(start, stagger=100, group_m=4))
        return candidates

    def set_up_backward(self, ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Save the operands whose gradients are needed, and the lists."""
        x, w, bias, _, _, *ctx.splits, _, ctx.group_name, _, _ = inputs
        save_operands(ctx, x, w, bias)

    def backward(self, ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Send the gradient back the way its rows came; the product's own gradient is local."""
        (grad,) = grads
        assert grad is not None
        rows = entrance(_GRADIENT)(grad, *ctx.splits, ctx.group_name)
        return product_gradients(ctx, rows)


def check_even(rows: int, ranks: int) -> None:
    """Refuse rows that cannot be split evenly.

    Raises:
        ArgumentError: The number of ranks does not divide them.
    """
    if rows % ranks:
        raise ArgumentError(
            f"{GemmAllToAll.name}: rows of x must divide evenly over {ranks} ranks unless splits "
            f"are given; got {rows}. Pass input_splits and output_splits, or pad x to "
            f"{balanced(rows, ranks)[0] * ranks} rows."
        )


OPERATOR = schema.define(GemmAllToAll.name)


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
    """Multiply and send the result's rows to their ranks in one kernel.

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
            a contiguous ``[K, N]``), the same on every rank. An address or a stride that is no
            multiple of 16 bytes costs the fused kernel a copy in each call.
        bias: ``[N]`` of the result's dtype; added by the rank that computes a row.
        input_splits: Rows of x for each rank; they sum to M. Default: M split evenly, and then R
            must divide M.
        output_splits: Rows from each rank. Both lists are given or neither, and ``input_splits[d]``
            on rank s must be ``output_splits[s]`` on rank d. Lists are compared on the host in each
            call; even splits, once.
        x_scale: float32: what x's elements are to be multiplied by; needed with float8 and refused
            without. ``[]`` or ``[1]``; one a row: ``[M]`` or ``[M, 1]``; or one for 128 elements of
            a row: ``[M, ceil(K / 128)]``, which is fastest with contiguous columns.
        w_scale: The same for w: ``[]`` or ``[1]``; one a row: ``[N]`` or ``[1, N]``; or beside such
            scales of x one for 128 x 128 elements: ``[ceil(N / 128), ceil(K / 128)]``.
        out_dtype: Of the result: float16, bfloat16 or float32; default: x's, and bfloat16 for
            float8.
        group: 1 to 8 ranks of one node, or ranks of several nodes, between which ``"chunked"``
            sends slices over the network and ``"unfused"`` takes any call; default: the default
            process group.
        impl: The implementation. ``"fused"`` is a single kernel. ``"chunked"`` is ``torch.mm`` for
            each rank's rows, which copy engines send (rows split evenly). ``"pushed"`` is a
            product, then a kernel that stores the rows at the peers (rows split evenly).
            ``"unfused"`` or ``"nccl"`` is ``F.linear``, then ``all_to_all_single``. ``"auto"`` is
            the one of these that is predicted to be the fastest; :func:`interlace.explain` says
            which it is and why. ``"measured"`` is the one that the first call of a kind measures
            to be the fastest (:func:`interlace.autotune`). ``"batch_invariant"`` gives a row the
            same bits in every batch (:func:`interlace.batch_invariant`). An explicit choice is
            never replaced.
        config: The fused kernel's configuration, the same on every rank; default: the tuned
            table's.

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
        GroupError: the group is too large.
        BackendError: float8 on a GPU without it (compute capability below 8.9).
        PeerTimeoutError: a peer did not make this call before the group's deadline. On CUDA the
            kernel ends, fills its output with NaN, and the next call on the group, or
            :func:`interlace.synchronize`, raises.

    Example:
        >>> # four ranks, 1024 rows each
        >>> # x [1024, 2048], w [8192, 2048]; y [1024, 8192] has 256 rows from each of 4 ranks
        >>> y = interlace.gemm_all_to_all(x, w)

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), "GEMM + All-to-All".
    """
    splits = [input_splits, output_splits]
    y: torch.Tensor = schema.call(
        OPERATOR, x, w, bias, x_scale, w_scale, splits, out_dtype, group, impl, config
    )
    return y


# The gradient is an operator of its own, so that compilers see what it sends.

_GRADIENT = "gemm_all_to_all_gradient"
_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    f"{_GRADIENT}(Tensor grad, SymInt[]? input_splits, SymInt[]? output_splits, "
    "str group_name) -> Tensor",
    tags=OPERATOR_TAGS,
)


def _run_gradient(
    grad: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group_name: str,
) -> torch.Tensor:
    """Send every row to the rank that it came from; the forward pass has checked the lists."""
    process_group = process_group_named(group_name)
    return reference.send_back(grad, input_splits, output_splits, process_group)


def _fake_gradient(
    grad: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group_name: str,
) -> torch.Tensor:
    rows = grad.shape[0] if input_splits is None else sum(input_splits)
    return grad.new_empty([rows, grad.shape[1]])


def _set_up_second_derivative(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.input_splits, ctx.output_splits, ctx.group_name = inputs


def _second_derivative(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Send rows that came back from their owners to them once more."""
    # The transpose of the way back is the way there: the lists change places.
    rows = entrance(_GRADIENT)(grad, ctx.output_splits, ctx.input_splits, ctx.group_name)
    return rows, None, None, None


register(
    _library,
    _GRADIENT,
    _run_gradient,
    _fake_gradient,
    backward=_second_derivative,
    setup_context=_set_up_second_derivative,
)
