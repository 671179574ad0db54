"""From a call to a kernel launch: agreement and splits, which implementation, which configuration,
the launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm import Group, copies, process_group_named
from interlace.comm.constants import on_device
from interlace.comm.dlpack import bytes_at, view_as
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_matrix
from interlace.comm.replays import places
from interlace.errors import ArgumentError
from interlace.gemm import fetch
from interlace.gemm.choice import Choice, Decision, choose_product, group_for, resolve
from interlace.gemm.fetch import Own, Piece, Staging, offset_behind
from interlace.gemm.launch import (
    has_descriptors,
    operand_arguments,
    options,
    padded_columns,
    programs,
)
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands
from interlace.gemm.outputs import multiply_into
from interlace.gemm.splits import check_sum
from interlace.gemm.spread import spread
from interlace.operators.all_gather_gemm import reference
from interlace.operators.all_gather_gemm.config import OPERATOR, AllGatherGemmConfig


def choose(**call: Any) -> Choice[AllGatherGemmConfig]:
    """What ``impl="auto"`` runs; see :func:`interlace.gemm.choice.choose_product`. ``rows`` are
    all ranks'.
    """
    return choose_product(OPERATOR, AllGatherGemmConfig, **call)


def run(
    operands: Operands,
    splits: Sequence[int] | None,
    gather: bool,
    group_name: str,
    impl: str,
    config: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one call whose arguments ``api`` has validated: the product, and the gathered x or,
    unless asked for, no rows.
    """
    group = group_for(OPERATOR, group_name, operands.x.device)
    key = (
        OPERATOR,
        *operands.signature(),
        None if splits is None else tuple(splits),
        gather,
        impl,
        config,
    )
    decision = group.once(key, lambda: _decide(operands, splits, gather, group, impl, config))
    rows = decision.rows
    if operands.columns and sum(rows):
        if decision.how == "fused":
            return _fused(
                operands.for_kernel(), rows, gather, group, decision.config, decision.mark
            )
        if decision.how == "chunked":
            return _split(operands, rows, gather, group, decision.mark)
        if decision.how == "pushed":
            return _mapped(operands, rows, gather, group, decision.mark)
    group.check()
    y, gathered = reference.all_gather_gemm(
        operands.x, operands.w, operands.bias, operands.x_scale, operands.w_scale,
        operands.out_dtype, rows, process_group_named(group_name),
    )  # fmt: skip
    if not gather:
        return y, operands.x.new_empty([0, operands.inner])
    # An operator's result is not its argument
    return y, gathered.clone() if gathered is operands.x else gathered


def _decide(
    operands: Operands,
    splits: Sequence[int] | None,
    gather: bool,
    group: Group,
    impl: str,
    config: str,
) -> Decision[AllGatherGemmConfig]:
    rows = [operands.rows] * group.world_size if splits is None else list(splits)
    mine = rows[group.rank] if group.rank < len(rows) else 0
    mark = group.agree(
        OPERATOR,
        # Compared with the other arguments, so that a rank whose x does not fit its split stops all
        # of them.
        rows_of_x_beyond_their_split=operands.rows - mine,
        splits=tuple(rows),
        **operands.agreed(),
        impl=impl,
        config=config,
    )
    operands.require_supported(OPERATOR)
    check_sum(f"{OPERATOR}: splits", rows, group.world_size, None, "")
    if operands.rows != mine:
        raise ArgumentError(
            f"{OPERATOR}: x must have as many rows as splits say, {mine} on rank {group.rank}; "
            f"got {operands.rows}."
        )
    choice = choose(**operands.sizes(sum(rows)), world_size=group.world_size)
    chosen = AllGatherGemmConfig.parse(config) if config else choice.config
    return Decision(
        mark,
        resolve(OPERATOR, impl, choice, operands, even=True),
        choice.otherwise,
        chosen,
        tuple(rows),
    )


def _fused(
    operands: Operands,
    splits: Sequence[int],
    gather: bool,
    group: Group,
    config: AllGatherGemmConfig,
    mark: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[M, N]`` by one kernel, and the gathered x ``[M, K]`` if asked for, else ``[0, K]``."""
    x = operands.x
    y = x.new_empty(
        [sum(splits), padded_columns(operands.columns, operands.out_dtype)],
        dtype=operands.out_dtype,
    )
    whole, staging = _gathered(operands, splits), _staging(operands, splits)
    staging.workspace(group)  # before anything is enqueued: it may have to grow

    def enqueue() -> None:
        launch = prepare(group, staging, operands, splits, y, whole, config, mark)
        if group.world_size == 1:
            launch()
            return
        pieces, own = (
            _pieces(group, staging, splits, whole),
            _own(group, staging, splits, whole, gather),
        )
        fetching = fetch.begin(
            group, staging, operands.x, operands.x_scale, whole, pieces, mark, own=own,
            first=bool(config.stage_first), signal=True
        )  # fmt: skip
        launch()
        fetch.end(group, fetching)

    with group.running():
        key = (
            OPERATOR,
            "fused",
            config,
            tuple(splits),
            gather,
            mark,
            places(y, whole),
            operands.place(),
        )
        group.replays.run(key, enqueue)
    return y[:, : operands.columns].contiguous(), _result(
        operands, whole if group.world_size > 1 else None, gather
    )


def _split(
    operands: Operands, splits: Sequence[int], gather: bool, group: Group, mark: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same by cuBLAS, a product for each rank's rows once they have come, this rank's own
    first.
    """
    operands = operands.with_contiguous_rows()
    y = operands.x.new_empty([sum(splits), operands.columns])
    if group.world_size == 1:
        multiply_into(y, operands.x, operands.w.T, operands.bias)
        return y, _result(operands, None, gather)
    require(group.backend)
    whole, staging = _gathered(operands, splits), _staging(operands, splits)
    staging.workspace(group)  # before anything is enqueued: it may have to grow

    def enqueue() -> None:
        parts, arriving, weight = (
            y.split(splits),
            whole[:, : operands.inner].split(splits),
            operands.w.T,
        )
        pieces, own = (
            _pieces(group, staging, splits, whole),
            _own(group, staging, splits, whole, gather),
        )
        fetching = fetch.begin(
            group, staging, operands.x, operands.x_scale, whole, pieces, mark, own=own, first=True,
            signal=False
        )  # fmt: skip
        multiply_into(parts[group.rank], operands.x, weight, operands.bias)
        for step in range(1, group.world_size):
            source = (group.rank + step) % group.world_size
            copies.wait_for(group, fetching.arrived[source])
            multiply_into(parts[source], arriving[source], weight, operands.bias)
        fetch.settle(group, staging, y, mark)
        fetch.end(group, fetching)

    with group.running():
        key = (OPERATOR, "chunked", tuple(splits), gather, mark, places(y, whole), operands.place())
        group.replays.run(key, enqueue)
    return y, _result(operands, whole, gather)


def _mapped(
    operands: Operands, splits: Sequence[int], gather: bool, group: Group, mark: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same by one kernel that stores rows in all ranks' memory, and cuBLAS once they are here."""
    operands = operands.with_contiguous_rows()
    x = operands.x
    y = x.new_empty([sum(splits), operands.columns])
    if group.world_size == 1:
        multiply_into(y, x, operands.w.T, operands.bias)
        return y, _result(operands, None, gather)
    require(group.backend)
    whole = _gathered(operands, splits)
    # Before anything is enqueued: its memory may have to grow
    spreading = spread(group, OPERATOR, x, whole, splits, mark)

    def enqueue() -> None:
        spreading()
        multiply_into(y, whole[:, : operands.inner], operands.w.T, operands.bias)

    with group.running():
        key = (OPERATOR, "pushed", tuple(splits), mark, places(y, whole), operands.place())
        group.replays.run(key, enqueue)
    return y, _result(operands, whole, gather)


def _gathered(operands: Operands, splits: Sequence[int]) -> torch.Tensor:
    """Memory for all ranks' rows, ``[M, padded K]``, scales behind it."""
    x = operands.x
    shape = [sum(splits), padded_columns(max(operands.inner, 1), x.dtype)]
    nbytes = _scale_offset(shape, x.dtype) + 4 * shape[0]
    return view_as(x.new_empty(nbytes, dtype=torch.uint8), shape, x.dtype)


def _scale_offset(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from rows ``[*shape]`` to their scales."""
    return offset_behind(math.prod(shape) * dtype.itemsize)


def _staging(operands: Operands, splits: Sequence[int]) -> Staging:
    return Staging(OPERATOR, max(splits), operands.inner, operands.x.dtype)


def _pieces(
    group: Group, staging: Staging, splits: Sequence[int], whole: torch.Tensor
) -> dict[int, list[Piece]]:
    """What comes from each peer, the neighbour first."""
    scales = whole.data_ptr() + _scale_offset(whole.shape, whole.dtype)
    found: dict[int, list[Piece]] = {}
    for step in range(1, group.world_size):
        source = (group.rank + step) % group.world_size
        rows, first = splits[source], sum(splits[:source])
        found[source] = pieces = []
        if rows and whole.dtype.itemsize == 1:  # float8 has scales
            pieces.append(Piece(staging.scale_offset, scales + 4 * first, 4 * rows))
        if rows:
            pieces.append(
                Piece(0, whole.data_ptr() + first * staging.row_bytes, rows * staging.row_bytes)
            )
    return found


def _own(
    group: Group, staging: Staging, splits: Sequence[int], whole: torch.Tensor, gather: bool
) -> Own | None:
    """This rank's rows among the gathered ones, which are handed out if ``gather``."""
    rows, first = splits[group.rank], sum(splits[: group.rank])
    return (
        Own(0, rows, whole.data_ptr() + first * staging.row_bytes, rows, rows, staged=True)
        if gather
        else None
    )


def _result(operands: Operands, whole: torch.Tensor | None, gather: bool) -> torch.Tensor:
    """The gathered x as callers get it, ``[M, K]``, or no rows unless it was asked for; ``whole``
    is None where x is all of it.
    """
    if not gather:
        return operands.x.new_empty([0, operands.inner])
    if whole is None:
        return operands.x.clone(memory_format=torch.contiguous_format)
    return whole[:, : operands.inner].contiguous()


def prepare(
    group: Group,
    staging: Staging,
    operands: Operands,
    splits: Sequence[int],
    y: torch.Tensor,
    whole: torch.Tensor,
    config: AllGatherGemmConfig,
    mark: int = 0,
) -> Launch:
    """The product's launch; ``y`` is ``[M, padded columns]``, ``whole`` the gathered x ``[M, padded
    K]``, scales behind it.
    """
    require(group.backend)
    from interlace.operators.all_gather_gemm import kernel

    ranks, dtype, workspace = group.world_size, operands.x.dtype, staging.workspace(group)
    routes = on_device(group, [(sum(splits[:rank]), splits[rank], 0) for rank in range(ranks)])
    descriptors = has_descriptors(group)
    # A whole tile at the end of one rank's rows would cover the next one's; beyond the last rank's
    # there is nothing.
    tiles = descriptors and all(count % config.block_m == 0 for count in splits[:-1])
    gathered: Any = whole[:, : max(operands.inner, 1)]
    if descriptors:
        gathered = describe_matrix(gathered, whole.shape[1], [config.block_m, config.block_k])
    result = (
        describe_matrix(y[:, : operands.columns], y.shape[1], [config.block_m, config.block_n])
        if tiles
        else None
    )
    align, inner_align = (
        ALIGNMENT_BYTES // operands.out_dtype.itemsize,
        ALIGNMENT_BYTES // dtype.itemsize,
    )
    x, w, bias, x_scale, w_scale, *strides = operand_arguments(operands, config, descriptors)
    scales = None
    if x_scale is not None:
        place = whole.data_ptr() + _scale_offset(whole.shape, dtype)
        scales = view_as(
            bytes_at(place, (4 * len(whole),), (1,), group.device, whole),
            (len(whole),),
            torch.float32,
        )
    arguments = (
        x, w, bias, x_scale, w_scale, scales, gathered, result, y.data_ptr(),
        workspace.signals.address, workspace.epochs, group.context(OPERATOR), routes, mark,
        max(splits), operands.columns, operands.inner, *strides, y.shape[1] // align,
        whole.shape[1] // inner_align,
    )  # fmt: skip
    constants = options(operands, config, group, descriptors) | {
        "TILES": tiles,
        "ALIGN": align,
        "INNER_ALIGN": inner_align,
    }
    multipliers = programs(group, config)
    if ranks > 1 and group.backend == "cuda":
        # Who tells peers that their rows were fetched needs a processor while this one waits
        multipliers = max(multipliers - 1, 1)
    return Launch(
        kernel.all_gather_gemm, (multipliers,), arguments, constants, (operands, y, whole)
    )
