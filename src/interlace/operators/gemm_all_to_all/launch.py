"""From a call to a kernel launch: agreement and splits, which implementation, which configuration,
the launch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from interlace import tuning
from interlace.comm import Group, process_group_named
from interlace.comm.constants import on_device
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_ranks
from interlace.comm.outputs import BUFFERS
from interlace.errors import ArgumentError, RankMismatchError
from interlace.gemm.choice import Choice, Decision, choose_product, group_for, resolve
from interlace.gemm.kernels import layout
from interlace.gemm.launch import (
    has_descriptors,
    operand_arguments,
    options,
    padded_columns,
    programs,
    spread_ns,
)
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands, contiguous_dimension
from interlace.gemm.outputs import multiply_batch_into, run_batch_into_output, run_into_output
from interlace.gemm.splits import balanced, check_sum
from interlace.operators.gemm_all_to_all import reference
from interlace.operators.gemm_all_to_all.config import BATCH, OPERATOR, GemmAllToAllConfig


def choose(**call: Any) -> Choice[GemmAllToAllConfig]:
    """What ``impl="auto"`` runs; see :func:`interlace.gemm.choice.choose_product`."""
    return choose_product(OPERATOR, GemmAllToAllConfig, **call)


def choose_batch(**call: Any) -> Choice[GemmAllToAllConfig]:
    """Whether the fused kernel of a batch is faster than the pair, and its configuration; ``rows``
    are those of all products.
    """
    return choose_product(BATCH, GemmAllToAllConfig, **call)


def run(
    operands: Operands,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group_name: str,
    impl: str,
    config: str,
) -> torch.Tensor:
    """Run one call whose arguments ``api`` has validated."""
    group = group_for(OPERATOR, group_name, operands.x.device)
    if input_splits is None:
        key = (OPERATOR, *operands.signature(), impl, config)
        sent, decision = group.once(key, lambda: _decide(operands, None, None, group, impl, config))
    else:
        sent, decision = _decide(operands, input_splits, output_splits, group, impl, config)
    received = [counts[group.rank] for counts in sent]
    if not operands.columns or not any(map(sum, sent)):
        return operands.x.new_empty([sum(received), operands.columns], dtype=operands.out_dtype)
    how = decision.how
    if how in tuning.CARRIED:
        y = run_into_output(
            how, "all_to_all", operands, group, process_group_named(group_name), decision.config,
            replace=impl != "auto"
        )  # fmt: skip
        if y is not None:
            return y
        how = decision.otherwise
    if how == "fused":
        return _fused(operands.for_kernel(), sent, group, decision.config, decision.mark)
    group.check()
    return reference.gemm_all_to_all(
        operands.x, operands.w, operands.bias, operands.x_scale, operands.w_scale,
        operands.out_dtype, sent[group.rank], received, process_group_named(group_name),
    )  # fmt: skip


def _decide(
    operands: Operands,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group: Group,
    impl: str,
    config: str,
) -> tuple[list[list[int]], Decision[GemmAllToAllConfig]]:
    """``sent[s][d]``: rows from rank s to rank d; and how they are sent."""
    mark = group.agree(
        OPERATOR,
        splits=f"even, of {operands.rows} rows" if input_splits is None else "given",
        **operands.agreed(),
        impl=impl,
        config=config,
    )
    operands.require_supported(OPERATOR)
    sent = _sent(group, operands.rows, input_splits, output_splits)
    # Rows of the rank that has most: the same choice on every rank.
    choice = choose(**operands.sizes(max(map(sum, sent))), world_size=group.world_size)
    how = resolve(
        OPERATOR, impl, choice, operands, even=len(set(itertools.chain.from_iterable(sent))) == 1
    )
    return sent, Decision(
        mark, how, choice.otherwise, GemmAllToAllConfig.parse(config) if config else choice.config
    )


def run_batch(x: torch.Tensor, w: torch.Tensor, group_name: str, impl: str) -> torch.Tensor:
    """Run one call of several products, ``x [B, M, K] @ w [B, K, N]``, rows split evenly; ``[B M,
    N]``.

    Args:
        impl: ``"fused"``, ``"chunked"`` (``torch.bmm`` for each rank's rows, and copy engines that
            take them) or ``"auto"``.

    Raises:
        ArgumentError: rows do not divide evenly, dtypes differ, or impl is none of these.
        RankMismatchError: ranks differ in shapes, dtype or impl.
    """
    count, rows, inner = x.shape
    columns = w.shape[2]
    group = group_for(OPERATOR, group_name, x.device)

    def decide() -> Decision[GemmAllToAllConfig]:
        check_dtypes([x, w])
        mark = group.agree(
            BATCH,
            the_shape_of_x=tuple(x.shape),
            the_shape_of_w=tuple(w.shape),
            dtype=str(x.dtype),
            impl=impl,
        )
        if impl not in ("auto", "fused", "chunked"):
            raise ArgumentError(f"{BATCH}: impl must be one of auto, fused, split; got {impl!r}.")
        check_even(rows, group.world_size)
        choice = choose_batch(
            rows=count * rows, columns=columns, inner=inner, dtype=x.dtype, device=x.device,
            world_size=group.world_size
        )  # fmt: skip
        wanted = choice.impl if impl == "auto" else impl
        return Decision(mark, wanted if wanted == "chunked" else "fused", "fused", choice.config)

    decision = group.once((BATCH, x.shape, w.shape, x.dtype, w.dtype, impl), decide)
    if not count * rows * columns:
        return x.new_empty([count * rows, columns])
    if decision.how == "chunked" and group.world_size > 1:
        y = run_batch_into_output(
            [x], [w], group, process_group_named(group_name), replace=impl != "auto"
        )
        if y is not None:
            return y
    along_k = contiguous_dimension(w[0]) == 0
    # Views, where products lie one behind the other.
    weights = (
        w.mT.reshape(count * columns, inner) if along_k else w.reshape(count * inner, columns).T
    )
    operands = Operands(x.reshape(count * rows, inner), weights, None, None, None, x.dtype)
    sent = [[rows // group.world_size] * group.world_size] * group.world_size
    return _fused(
        operands.for_kernel(),
        sent,
        group,
        decision.config,
        decision.mark,
        Batch(count, rows, columns),
    )


def run_sum(x: Sequence[torch.Tensor], w: Sequence[torch.Tensor], group_name: str) -> torch.Tensor:
    """Run one call of a sum of batches, each as :func:`run_batch` takes it, by ``"chunked"``.

    Raises:
        ArgumentError: rows do not divide evenly, or dtypes differ.
        RankMismatchError: ranks differ in shapes or dtype.
    """
    check_dtypes([*x, *w])
    (count, rows, _), columns = x[0].shape, w[0].shape[2]
    group = group_for(OPERATOR, group_name, x[0].device)
    shapes = tuple(tuple(each.shape) for each in (*x, *w))
    group.agree(f"{BATCH}, sum", the_shapes_of_x_and_w=shapes, dtype=str(x[0].dtype))
    check_even(rows, group.world_size)
    if group.world_size > 1 and count * rows * columns:
        y = run_batch_into_output(x, w, group, process_group_named(group_name), replace=False)
        if y is not None:
            return y
    total = x[0].new_empty([count, rows, columns])
    multiply_batch_into(total, x, w)
    sent = total.unflatten(1, (group.world_size, -1)).transpose(0, 1).reshape(count * rows, columns)
    return reference.send_back(sent, None, None, process_group_named(group_name))


def run_gradient(
    grad: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group_name: str,
) -> torch.Tensor:
    """The rows of the product's gradient, back where the product was computed. Its forward pass has
    checked the splits.
    """
    return reference.send_back(grad, input_splits, output_splits, process_group_named(group_name))


def check_dtypes(matrices: Sequence[torch.Tensor]) -> None:
    """Refuse operands of different dtypes.

    Raises:
        ArgumentError: The matrices have more than one dtype.
    """
    dtypes = [matrix.dtype for matrix in matrices]
    if len(set(dtypes)) > 1:
        raise ArgumentError(
            f"{BATCH}: all operands must have the same dtype; got {dtypes}. Convert them."
        )


def check_even(rows: int, ranks: int) -> None:
    """Refuse rows that cannot be split evenly.

    Raises:
        ArgumentError: as said.
    """
    if rows % ranks:
        raise ArgumentError(
            f"{OPERATOR}: rows of x must divide evenly over {ranks} ranks unless splits are "
            f"given; got {rows}. "
            f"Pass input_splits and output_splits, or pad x to {balanced(rows, ranks)[0] * ranks} "
            "rows."
        )


def _sent(
    group: Group, rows: int, input_splits: Sequence[int] | None, output_splits: Sequence[int] | None
) -> list[list[int]]:
    """``sent[s][d]``: rows from rank s to rank d, checked.

    Lists that were given are exchanged in every call: those of one rank may change while another's
    stay as they were, and a rank that remembered its answer would not come to the exchange that the
    others need.

    Raises:
        ArgumentError, RankMismatchError: on every rank, naming the one whose list is wrong.
    """
    ranks = group.world_size
    if input_splits is None or output_splits is None:
        check_even(rows, ranks)
        return [[rows // ranks] * ranks] * ranks
    answers = group.exchange(
        f"{OPERATOR} (splits)", [rows, list(input_splits), list(output_splits)]
    )
    for rank, (its_rows, sends, receives) in enumerate(answers):
        check_sum(
            f"{OPERATOR}: input_splits on rank {rank}", sends, ranks, its_rows, "its rows of x"
        )
        check_sum(f"{OPERATOR}: output_splits on rank {rank}", receives, ranks, None, "")
    for source, (_, sends, _) in enumerate(answers):
        for destination, (_, _, receives) in enumerate(answers):
            if sends[destination] != receives[source]:
                raise RankMismatchError(
                    f"{OPERATOR}: input_splits[{destination}] on rank {source} and "
                    f"output_splits[{source}] on rank {destination} "
                    f"must be equal; got {sends[destination]} and {receives[source]}. Nothing was "
                    "computed."
                )
    return [sends for _, sends, _ in answers]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Products whose operands lie one behind the other.

    Attributes:
        count: how many.
        rows, columns: M and N of each.
    """

    count: int
    rows: int
    columns: int


def _fused(
    operands: Operands,
    sent: list[list[int]],
    group: Group,
    config: GemmAllToAllConfig,
    mark: int,
    batch: Batch | None = None,
) -> torch.Tensor:
    """``[rows for this rank, N]`` by one kernel; ``sent[s][d]`` rows go from rank s to rank d, of a
    batch of each product.
    """
    batch = batch or Batch(1, operands.rows, operands.columns)
    columns = batch.columns
    rows = batch.count * sum(counts[group.rank] for counts in sent)
    most = batch.count * max(
        sum(counts[dest] for counts in sent) for dest in range(group.world_size)
    )
    stride = padded_columns(columns, operands.out_dtype)
    shape = [rows, stride]
    if group.world_size == 1:
        y = operands.x.new_empty(shape, dtype=operands.out_dtype)
        launch = prepare(group, operands, sent, config, mark, y.data_ptr(), 0, 0, batch=batch)
        with group.running():
            launch()
        return y[:, :columns].contiguous()
    output = group.outputs.take(most * stride * operands.out_dtype.itemsize)
    y = output.tensor(shape, operands.out_dtype, group.device)
    place = output.address, output.buffer_bytes, output.index
    with group.running():
        key = (OPERATOR, config, mark, tuple(map(tuple, sent)), batch, place, operands.place())
        group.replays.run(
            key, lambda: prepare(group, operands, sent, config, mark, *place, batch=batch)()
        )
    y = y[:, :columns]
    return y.contiguous() if output.lent else y.clone(memory_format=torch.contiguous_format)


def prepare(
    group: Group,
    operands: Operands,
    sent: list[list[int]],
    config: GemmAllToAllConfig,
    mark: int,
    buffers: int,
    buffer_bytes: int,
    taken: int,
    *,
    batch: Batch | None = None,
    tile_stores: bool = True,
) -> Launch:
    """The launch, into buffer ``taken`` of those from ``buffers`` on (rank 0's copy). Collective
    when the workspace must grow.

    Args:
        batch: what the operands are of; default: of one product.
        tile_stores: let tiles travel by copies out of shared memory where the GPU has them; else by
            ordinary stores.
    """
    require(group.backend)
    from interlace.operators.gemm_all_to_all import kernel

    ranks, me = group.world_size, group.rank
    batch = batch or Batch(1, operands.rows, operands.columns)
    workspace = group.workspace(OPERATOR, 4096, layout.HEADER)
    routes, first = [], 0
    for dest in range(ranks):
        routes.append(
            (first, sent[me][dest], batch.count * sum(sent[source][dest] for source in range(me)))
        )
        first += sent[me][dest]
    dtype = operands.out_dtype
    stride = padded_columns(batch.columns, dtype)
    received = [batch.count * sum(counts[dest] for counts in sent) for dest in range(ranks)]
    # Every rank must take the same branch only for speed: both put the same bytes in the same
    # places.
    even = tile_stores and all(count % config.block_m == 0 for count in sent[me])
    descriptors = has_descriptors(group) and group.stride % 16 == 0
    tiles = None
    if descriptors and even and ranks > 1:
        sizes = [
            (BUFFERS + 1, buffer_bytes // dtype.itemsize),
            (max(received), stride),
            (batch.columns, 1),
        ]
        tiles = describe_ranks(group, buffers, dtype, sizes, [config.block_m, config.block_n])
    align = ALIGNMENT_BYTES // dtype.itemsize
    x, w, bias, x_scale, w_scale, *strides = operand_arguments(operands, config, descriptors)
    arguments = (
        x, w, bias, x_scale, w_scale, tiles, buffers, workspace.signals.address, workspace.epochs,
        group.context(OPERATOR), on_device(group, routes), mark, buffer_bytes, taken,
        max(max(counts) for counts in sent), received[me], batch.rows, batch.columns,
        operands.inner, *strides, stride // align, spread_ns(config, operands.inner),
    )  # fmt: skip
    constants = options(operands, config, group, descriptors)
    constants |= {
        "BATCH": batch.count,
        "ALIGN": align,
        "EVEN": tiles is not None,
        "INTERLEAVE": config.interleave,
    }
    return Launch(
        kernel.gemm_all_to_all, (programs(group, config),), arguments, constants, (operands,)
    )
