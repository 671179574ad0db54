"""``impl="triggered"``: a kernel that counts the tiles it has stored, and copy engines that start
when a rank's rows are complete.
"""

from __future__ import annotations

import functools

import torch

from interlace.comm import Group
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_parts
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.implementations.outputs import Output, run_into_output
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.launch import constants, has_descriptors, operand_arguments, programs
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands
from interlace.registry import Implementation
from interlace.units import ceil_div


def run(call: GemmCall) -> torch.Tensor | None:
    """Multiply by a kernel that counts its tiles; copies wait for the counts.

    None if the caller has not asked for it and there is no output for these sizes.
    """
    operands, group, config = call.operands, call.group, call.config
    rows = operands.rows // group.world_size
    tiles = ceil_div(rows, config.block_m) * ceil_div(operands.columns, config.block_n)
    output = Output(
        "triggered",
        call.operator.collective,
        functools.partial(count_product, group),
        (group.world_size, rows, operands.columns),
        operands.out_dtype,
        {"transport": "copy_engine", "tiles": tiles},
    )
    # The copies' waits are not for graphs that anybody may replay.
    return run_into_output(
        call,
        output,
        operands.for_kernel(),
        call.operator.adds_ranks,
        config,
        is_replayed=False,
    )


def count_product(
    group: Group,
    operands: Operands,
    adds_ranks: bool,
    config: GemmConfig,
    *,
    out: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Launch the product that counts its tiles.

    Args:
        adds_ranks: Whether the result is a sum over ranks; then the bias is added to this rank's
            own rows only.
        out: ``[R, M/R, N]``, the rows for rank r at r.
        counters: One int32 for each piece of ``out``.
    """
    require(group.backend)
    from interlace.gemm.kernels.counted import counted_product

    pieces = counters.numel() // group.world_size
    rows = operands.rows // counters.numel()
    descriptors = has_descriptors(group)
    # A whole tile at the end of a piece would cover the next one of its rank.
    is_aligned = out.stride(1) * out.itemsize % ALIGNMENT_BYTES == 0
    tiles = descriptors and is_aligned and (pieces == 1 or rows % config.block_m == 0)
    arguments = operand_arguments(operands, config, descriptors) | {
        "tiles": describe_parts(out, [config.block_m, config.block_n]) if tiles else None,
        "y_address": out.data_ptr(),
        "counters_address": counters.data_ptr(),
        "me": group.rank,
        "pieces": pieces,
        "rows": rows,
        "N": operands.columns,
        "K": operands.inner,
        "part_stride": out.stride(0),
        "y_stride": out.stride(1),
    }
    shared = constants(operands, config, group, descriptors=descriptors, tile_stores=tiles)
    flags = {"OWN_BIAS": adds_ranks}
    Launch(counted_product, (programs(group, config),), arguments, shared | flags)()


TRIGGERED = Implementation(
    "triggered",
    "a kernel that counts its tiles, and copy engines that wait for the counts",
    run,
    needs(even_rows=True),
    schedule="tiled",
)
