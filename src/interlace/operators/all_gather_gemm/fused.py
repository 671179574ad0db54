"""The launches of ``all_gather_gemm``: its fused kernel, and copies or stores before cuBLAS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.comm import Group
from interlace.comm.groups import copies
from interlace.comm.launching.constants import on_device
from interlace.comm.launching.kernels import Launch, describe_matrix, describe_parts
from interlace.comm.replay.replays import places
from interlace.comm.runtime.dlpack import bytes_at, view_as
from interlace.comm.runtime.interpreter import require
from interlace.gemm import fetch, launch
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.fetch import OwnRows, Piece, Staging, offset_behind
from interlace.gemm.implementations.chunked import multiply_into
from interlace.gemm.implementations.pushed import laid_out, multiply, push_rows
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands

NAME = "all_gather_gemm"

Pair = tuple[torch.Tensor, torch.Tensor]


def run(call: GemmCall) -> Pair:
    """Return the product ``[M, N]`` by one kernel, and the gathered x, ``[M, K]`` or no rows."""
    operands, group, rows = call.operands.for_kernel(), call.group, call.rows.by_rank
    x, config, mark = operands.x, call.config, call.mark
    shape = [sum(rows), launch.padded_columns(operands.columns, operands.out_dtype)]
    y = x.new_empty(shape, dtype=operands.out_dtype)
    gathered, staging = _gathered(operands, rows), _staging(operands, rows)
    # Before anything is enqueued: the workspace may have to grow.
    staging.workspace(group)

    def enqueue() -> None:
        product = prepare(group, staging, operands, rows, y, gathered, config, mark)
        if group.world_size == 1:
            product()
            return
        # 1. Stage this rank's rows, then fetch the peers' beside the product.
        _begin(call, operands, staging, gathered, signal=True)
        # 2. The product waits for each source's signal in the kernel.
        product()
        fetch.end(group)

    with group.running():
        key = NAME, "fused", config, rows, call.gather, mark, places(y, gathered), operands.memory()
        group.replays.run(key, enqueue, copied=[gathered])
    arrived = gathered if group.world_size > 1 else None
    y = launch.without_padding(y, operands.columns)
    return y, _result(operands, arrived, call.gather)


def run_chunked(call: GemmCall) -> Pair:
    """All-gather in chunks: cuBLAS multiplies each rank's rows as soon as they have arrived, this
    rank's own rows first.
    """
    return _gather_and_multiply(call, "chunked", _prepare_chunked)


def run_pushed(call: GemmCall) -> Pair:
    """All-gather by one kernel that stores this rank's rows in all ranks' memory; another one
    multiplies all rows once they have arrived.
    """
    return _gather_and_multiply(call, "pushed", _prepare_pushed)


Prepare = Callable[[GemmCall, Operands, torch.Tensor, torch.Tensor], Callable[[], None]]
"""Returns what enqueues a call with these operands, whose product and gathered x are the two
tensors. Collective when the workspace must grow, so it comes before anything is enqueued.
"""


def _gather_and_multiply(call: GemmCall, impl: str, prepare: Prepare) -> Pair:
    """Gather x and multiply it; a call that comes again is a CUDA graph."""
    call = laid_out(call.with_operands(call.operands.with_contiguous_rows()))
    operands, group, rows = call.operands, call.group, call.rows.by_rank
    y = operands.x.new_empty([sum(rows), operands.columns])
    if group.world_size == 1:
        multiply(call, y, operands.x, operands.bias)
        return y, _result(operands, None, call.gather)
    require(group.backend)
    gathered = _gathered(operands, rows)
    enqueue = prepare(call, operands, y, gathered)
    with group.running():
        key = NAME, impl, rows, call.gather, call.mark, places(y, gathered), operands.memory()
        # Copy engines know the pages of a copy, not its address, so graphs with copies are kept by
        # the allocation, too.
        group.replays.run(key, enqueue, copied=[gathered] if impl == "chunked" else ())
    return y, _result(operands, gathered, call.gather)


def _prepare_chunked(
    call: GemmCall, operands: Operands, y: torch.Tensor, gathered: torch.Tensor
) -> Callable[[], None]:
    group, rows = call.group, call.rows.by_rank
    staging = _staging(operands, rows)
    staging.workspace(group)

    def enqueue() -> None:
        parts, weight = y.split(rows), operands.w.T
        arriving = gathered[:, : operands.inner].split(rows)
        arrivals = _begin(call, operands, staging, gathered, signal=False)
        multiply_into(parts[group.rank], operands.x, weight, operands.bias)
        for step in range(1, group.world_size):
            source = (group.rank + step) % group.world_size
            copies.wait_for(group, arrivals[source])
            multiply_into(parts[source], arriving[source], weight, operands.bias)
        fetch.settle(group, staging, y, call.mark)
        fetch.end(group)

    return enqueue


def _prepare_pushed(
    call: GemmCall, operands: Operands, y: torch.Tensor, gathered: torch.Tensor
) -> Callable[[], None]:
    push = push_rows(call.group, NAME, operands.x, gathered, call.rows.by_rank, call.mark)

    def enqueue() -> None:
        push()
        multiply(call, y, gathered[:, : operands.inner], operands.bias)

    return enqueue


def _begin(
    call: GemmCall,
    operands: Operands,
    staging: Staging,
    gathered: torch.Tensor,
    *,
    signal: bool,
) -> fetch.Arrivals:
    """Enqueue the copies of the peers' rows into ``gathered``; see
    :func:`interlace.gemm.fetch.begin`.
    """
    group, rows = call.group, call.rows.by_rank
    return fetch.begin(
        group,
        staging,
        operands.x,
        operands.x_scale,
        gathered,
        _pieces(group, staging, rows, gathered),
        call.mark,
        own_rows=_own_rows(group, staging, rows, gathered) if call.gather else None,
        signal=signal,
    )


def _gathered(operands: Operands, splits: Sequence[int]) -> torch.Tensor:
    """Return memory for all ranks' rows, ``[M, padded K]``, with their scales behind it."""
    x = operands.x
    # Scales lie behind the rows in the same memory, so that one tensor keeps both alive.
    shape = [sum(splits), launch.padded_columns(max(operands.inner, 1), x.dtype)]
    nbytes = _scale_offset(shape, x.dtype) + 4 * shape[0]
    return view_as(x.new_empty(nbytes, dtype=torch.uint8), shape, x.dtype)


def _scale_offset(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes from rows of this shape to their scales."""
    return offset_behind(math.prod(shape) * dtype.itemsize)


def _staging(operands: Operands, splits: Sequence[int]) -> Staging:
    return Staging(NAME, max(splits), operands.inner, operands.x.dtype)


def _pieces(
    group: Group, staging: Staging, splits: Sequence[int], gathered: torch.Tensor
) -> dict[int, list[Piece]]:
    """Return what is fetched from each peer, the neighbour first."""
    scales = gathered.data_ptr() + _scale_offset(gathered.shape, gathered.dtype)
    by_source: dict[int, list[Piece]] = {}
    # Each rank begins with another peer, so no two fetch from the same one at a time.
    for step in range(1, group.world_size):
        source = (group.rank + step) % group.world_size
        rows, first = splits[source], sum(splits[:source])
        by_source[source] = pieces = []
        if rows and gathered.dtype.itemsize == 1:  # float8 has scales
            pieces.append(Piece(staging.scale_offset, scales + 4 * first, 4 * rows))
        if rows:
            pieces.append(
                Piece(0, gathered.data_ptr() + first * staging.row_bytes, rows * staging.row_bytes)
            )
    return by_source


def _own_rows(
    group: Group, staging: Staging, splits: Sequence[int], gathered: torch.Tensor
) -> OwnRows:
    """Return this rank's rows among the gathered ones."""
    rows, first = splits[group.rank], sum(splits[: group.rank])
    return OwnRows(
        0, rows, gathered.data_ptr() + first * staging.row_bytes, rows, rows, staged=True
    )


def _result(operands: Operands, gathered: torch.Tensor | None, gather: bool) -> torch.Tensor:
    """Return the gathered x as callers get it: ``[M, K]``, or no rows unless ``gather``.

    Args:
        gathered: The gathered rows; None where x is all of it.
    """
    if not gather:
        return operands.x.new_empty([0, operands.inner])
    if gathered is None:
        return operands.x.clone(memory_format=torch.contiguous_format)
    return gathered[:, : operands.inner].contiguous()


def prepare(
    group: Group,
    staging: Staging,
    operands: Operands,
    splits: Sequence[int],
    y: torch.Tensor,
    gathered: torch.Tensor,
    config: GemmConfig,
    mark: int = 0,
) -> Launch:
    """Return the product's launch.

    Args:
        splits: The rows of each rank.
        y: ``[M, padded columns]``.
        gathered: The gathered x, ``[M, padded K]``, with its scales behind it.
        mark: The number from the ranks' agreement.
    """
    require(group.backend)
    from interlace.operators.all_gather_gemm import kernel

    ranks, dtype, workspace = group.world_size, operands.x.dtype, staging.workspace(group)
    routes = on_device(group, [(sum(splits[:rank]), splits[rank], 0) for rank in range(ranks)])
    descriptors = launch.has_descriptors(group)
    # Tiles are stored as a whole only if the descriptor cuts off what lies beyond their source's
    # rows.
    part_rows = _part_rows(splits, config.block_m)
    tiles = descriptors and part_rows > 0
    gathered_tiles: Any = gathered[:, : max(operands.inner, 1)]
    if descriptors:
        gathered_tiles = describe_matrix(
            gathered_tiles, gathered.shape[1], [config.block_m, config.block_k]
        )
    result = None
    if tiles:
        parts = y[:, : operands.columns].unflatten(0, (-1, part_rows))
        result = describe_parts(parts, [config.block_m, config.block_n])
    align = ALIGNMENT_BYTES // operands.out_dtype.itemsize
    inner_align = ALIGNMENT_BYTES // dtype.itemsize
    scales = None
    if operands.x_scale is not None:
        address = gathered.data_ptr() + _scale_offset(gathered.shape, dtype)
        memory = bytes_at(address, (4 * len(gathered),), (1,), group.device, gathered)
        scales = view_as(memory, (len(gathered),), torch.float32)
    arguments = launch.operand_arguments(operands, config, descriptors) | {
        "scales": scales,
        "gathered": gathered_tiles,
        "result": result,
        "y_address": y.data_ptr(),
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(NAME),
        "routes": routes,
        "call": mark,
        "most_rows": max(splits),
        "part_rows": max(part_rows, 1),
        "N": operands.columns,
        "K": operands.inner,
        "row_groups": y.shape[1] // align,
        "inner_groups": gathered.shape[1] // inner_align,
    }
    shared = launch.constants(operands, config, group, descriptors=descriptors, tile_stores=tiles)
    multipliers = launch.programs(group, config)
    if ranks > 1 and group.backend == "cuda":
        # The kernel that tells peers that their rows were fetched needs an SM while this one waits.
        multipliers = max(multipliers - 1, 1)
    return Launch(
        kernel.all_gather_gemm,
        (multipliers,),
        arguments,
        shared | {"INNER_ALIGN": inner_align},
        (operands, y, gathered),
    )


def _part_rows(splits: Sequence[int], block_m: int) -> int:
    """Return the rows of the parts of the result that no tile may reach beyond; 0 if there are no
    such parts.
    """
    if len(set(splits)) == 1:
        return splits[0]
    # Tiles end where their rank's rows end, and behind the last rank's rows there is nothing.
    return sum(splits) if all(count % block_m == 0 for count in splits[:-1]) else 0
