"""The launch of the kernel of ``gemm_broadcast``."""

from __future__ import annotations

import torch

from gemm_broadcast import ROOT
from interlace.comm.launching.kernels import Launch
from interlace.comm.replay.replays import places
from interlace.comm.runtime.interpreter import require
from interlace.gemm.call import GemmCall
from interlace.gemm.launch import constants, operand_arguments, programs
from interlace.units import ceil_div


def run(call: GemmCall) -> torch.Tensor:
    """Return ``[M, N]`` on every rank, by one kernel."""
    call = call.with_operands(call.operands.for_kernel())
    operands, group = call.operands, call.group
    y = operands.x.new_empty([operands.rows, operands.columns])
    with group.running():
        # Calls that come again with the same addresses run as CUDA graphs.
        key = (call.operator.name, call.config, call.mark, places(y), operands.memory())
        group.replays.run(key, lambda: prepare(call, y)())
    return y


def prepare(call: GemmCall, y: torch.Tensor) -> Launch:
    """Return the launch. Collective when the workspace must grow."""
    require(call.group.backend)
    from gemm_broadcast import kernel

    operands, group, config = call.operands, call.group, call.config
    tiles = ceil_div(operands.rows, config.block_m) * ceil_div(operands.columns, config.block_n)
    workspace = group.workspace(call.operator.name, y.nbytes, kernel.FIRST_TILE.value + tiles)
    arguments = operand_arguments(operands, config, descriptors=False)
    del arguments["scales"]  # the operator takes no float8
    arguments |= {
        "y": y,
        "landing_address": workspace.data.address,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(call.operator.name),
        "call": call.mark,
        "M": operands.rows,
    }
    shared = constants(operands, config, group, descriptors=False, tile_stores=False)
    return Launch(
        kernel.gemm_broadcast,
        (programs(group, config),),
        arguments,
        shared | {"ROOT": ROOT},
        (operands, y),
    )
