"""From a call to a kernel launch: agreement and splits, which implementation, which configuration, the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm import Group, process_group_named
from interlace.comm.constants import on_device
from interlace.comm.dlpack import bytes_at, view_as
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_matrix, describe_ranks
from interlace.comm.outputs import BUFFERS, Output
from interlace.errors import ArgumentError
from interlace.ops.all_gather_gemm import fetch, reference
from interlace.ops.all_gather_gemm.config import OPERATOR, AllGatherGemmConfig
from interlace.ops.all_gather_gemm.fetch import per_source, scale_offset
from interlace.products import record
from interlace.products.choice import Choice, choose_product, group_for
from interlace.products.launch import has_descriptors, operand_arguments, options, padded_columns, programs
from interlace.products.operands import ALIGNMENT_BYTES, Operands
from interlace.products.splits import check_sum
from interlace.units import ceil_div

_MEMBERS = 8  # programs that share in sending a block of rows


def choose(**call: Any) -> Choice[AllGatherGemmConfig]:
    """What ``impl="auto"`` runs; see :func:`interlace.products.choice.choose_product`. ``rows`` are all ranks'."""
    return choose_product(OPERATOR, AllGatherGemmConfig, **call)


def run(
    operands: Operands, splits: Sequence[int] | None, gather: bool, group_name: str, impl: str, config: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one call whose arguments ``api`` has validated: the product, and the gathered x or, unless asked for, no rows."""
    group = group_for(OPERATOR, group_name, operands)
    rows = [operands.rows] * group.world_size if splits is None else list(splits)
    mine = rows[group.rank] if group.rank < len(rows) else 0
    mark = group.agree(
        OPERATOR,
        # Compared with the other arguments, so that a rank whose x does not fit its split stops all of them.
        rows_of_x_beyond_their_split=operands.rows - mine,
        splits=tuple(rows),
        **operands.agreed(),
        return_gathered=gather,
        impl=impl,
        config=config,
    )
    operands.require_supported(OPERATOR)
    check_sum(f"{OPERATOR}: splits", rows, group.world_size, None, "")
    if operands.rows != mine:
        raise ArgumentError(
            f"{OPERATOR}: x must have as many rows as splits say, {mine} on rank {group.rank}; got {operands.rows}."
        )
    choice = choose(**operands.sizes(sum(rows)), world_size=group.world_size)
    chosen = AllGatherGemmConfig.parse(config) if config else choice.config
    if operands.columns and sum(rows) and (choice.impl if impl == "auto" else impl) == "fused":
        return _fused(operands.for_kernel(), rows, gather, group, chosen, mark)
    group.check()
    y, gathered = reference.all_gather_gemm(
        operands.x, operands.w, operands.bias, operands.x_scale, operands.w_scale, operands.out_dtype,
        rows, process_group_named(group_name),
    )  # fmt: skip
    if not gather:
        return y, operands.x.new_empty([0, operands.inner])
    return y, gathered.clone() if gathered is operands.x else gathered  # an operator's result is not its argument


def _fused(
    operands: Operands, splits: list[int], gather: bool, group: Group, config: AllGatherGemmConfig, mark: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[M, N]`` by one kernel, and the gathered x ``[M, K]`` if asked for, else ``[0, K]``."""
    x = operands.x
    y = x.new_empty([sum(splits), padded_columns(operands.columns, operands.out_dtype)], dtype=operands.out_dtype)
    shape = [sum(splits), padded_columns(max(operands.inner, 1), x.dtype)]
    nbytes = scale_offset(shape, x.dtype) + 4 * shape[0]
    pushing = config.push_programs > 0 and group.world_size > 1
    space = group.outputs.take(nbytes) if pushing else None
    whole = (
        view_as(x.new_empty(nbytes, dtype=torch.uint8), shape, x.dtype)
        if space is None
        else space.tensor(shape, x.dtype, group.device)
    )
    launch = prepare(group, operands, splits, gather, y, whole, space, config, mark)
    with group.running():
        if pushing or group.world_size == 1:
            launch()
        else:
            fetch.run_beside(group, operands, splits, gather, whole, config, mark, launch)
    y = y[:, : operands.columns].contiguous()
    if not gather:
        return y, x.new_empty([0, operands.inner])
    if group.world_size == 1:
        return y, x.clone(memory_format=torch.contiguous_format)
    gathered = whole[:, : operands.inner]
    mine = space is None or space.lent
    return y, gathered.contiguous() if mine else gathered.clone(memory_format=torch.contiguous_format)


def prepare(
    group: Group,
    operands: Operands,
    splits: Sequence[int],
    gather: bool,
    y: torch.Tensor,
    whole: torch.Tensor,
    space: Output | None,
    config: AllGatherGemmConfig,
    mark: int = 0,
) -> Launch:
    """The launch; ``y`` is ``[M, padded columns]``, ``whole`` this rank's gathered x ``[M, padded K]``, in ``space`` if pushed.

    Collective when the workspace must grow.
    """
    require(group.backend)
    from interlace.ops.all_gather_gemm import kernel

    ranks, dtype = group.world_size, operands.x.dtype
    if space is None:
        workspace = fetch.workspace_for(group, splits, whole, config)
    else:
        workspace = group.workspace(OPERATOR, 4096, record.HEADER + (ranks + 1) * ceil_div(max(splits), config.block_m))
    routes = on_device(group, [(sum(splits[:rank]), splits[rank], 0) for rank in range(ranks)])
    descriptors = has_descriptors(group)
    # A whole tile at the end of one rank's rows would cover the next one's; beyond the last rank's there is nothing.
    tiles = descriptors and all(count % config.block_m == 0 for count in splits[:-1])
    gathered = result = None
    gathered_here: Any = whole[:, : max(operands.inner, 1)]
    if descriptors:
        gathered_here = describe_matrix(gathered_here, whole.shape[1], [config.block_m, config.block_k])
    if tiles:
        result = describe_matrix(y[:, : operands.columns], y.shape[1], [config.block_m, config.block_n])
    if tiles and space is not None:
        sizes = [(BUFFERS + 1, space.buffer_bytes // dtype.itemsize), (whole.shape[0], whole.shape[1]), (max(operands.inner, 1), 1)]
        gathered = describe_ranks(group, space.address, dtype, sizes, [config.block_m, config.block_k])
    align, inner_align = ALIGNMENT_BYTES // operands.out_dtype.itemsize, ALIGNMENT_BYTES // dtype.itemsize
    x, w, bias, x_scale, w_scale, *strides = operand_arguments(operands, config, descriptors)
    scales = None
    if x_scale is not None:
        place = whole.data_ptr() + scale_offset(whole.shape, dtype)
        scales = view_as(bytes_at(place, (4 * len(whole),), (1,), group.device, whole), (len(whole),), torch.float32)
    address, buffer_bytes, index = (whole.data_ptr(), 0, 0) if space is None else (space.address, space.buffer_bytes, space.index)
    arguments = (
        x, w, bias, x_scale, w_scale, scales, gathered, gathered_here, result, address, y.data_ptr(),
        workspace.signals.address, workspace.epochs, group.context(OPERATOR), routes, mark, buffer_bytes,
        scale_offset(whole.shape, dtype), index, per_source(workspace, ranks), max(splits),
        operands.columns, operands.inner, *strides, y.shape[1] // align, whole.shape[1] // inner_align,
    )  # fmt: skip
    pushers = 0 if space is None else min(config.push_programs, 2) if group.backend == "cpu" else config.push_programs
    constants = options(operands, config, group, descriptors)
    constants |= {"PUSHERS": pushers, "GATHER": int(gather), "MEMBERS": _MEMBERS, "TILES": tiles}
    constants |= {"ALIGN": align, "INNER_ALIGN": inner_align}
    multipliers = programs(group, config)
    if space is None and ranks > 1 and group.backend == "cuda":
        multipliers = max(multipliers - 1, 1)  # the launches around the copies need a processor while this one waits for them
    return Launch(kernel.all_gather_gemm, (pushers + multipliers,), arguments, constants, (operands, y, whole))
