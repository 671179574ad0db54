"""The launch of the fused kernel of ``gemm_all_to_all``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm import Group
from interlace.comm.groups.outputs import BUFFERS, Destination
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import Launch, describe_ranks
from interlace.comm.replay.deferred import DeferredCall
from interlace.comm.runtime.interpreter import require
from interlace.gemm import launch
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.kernels import layout
from interlace.gemm.operands import Operands
from interlace.units import ceil_div

NAME = "gemm_all_to_all"

Sent = Sequence[Sequence[int]]
"""``sent[s][d]``: rows that go from rank s to rank d."""


def run(call: GemmCall) -> DeferredCall | torch.Tensor:
    """Return the rows for this rank, ``[rows, N]``, by one kernel."""
    operands, sent, config, mark = call.operands, call.rows.sent, call.config, call.mark
    received = _received(sent)
    return launch.run_into_peers(
        call.group,
        operands,
        received[call.group.rank],
        operands.columns,
        launch.output_bytes(max(received), operands.columns, operands.out_dtype),
        (NAME, config, mark, sent),
        lambda group, operands, destination: prepare(
            group, operands, sent, config, mark, destination
        ),
    )


def _received(sent: Sent) -> list[int]:
    """Return the rows that each rank receives."""
    return [sum(counts) for counts in zip(*sent, strict=True)]


_SIGNALS = WorkspaceSize(NAME, 4096, layout.HEADER)


def reservation(call: GemmCall) -> Reservation:
    """Return the symmetric memory of a call: signals, and the result."""
    most_rows, operands = max(_received(call.rows.sent)), call.operands
    nbytes = launch.output_bytes(most_rows, operands.columns, operands.out_dtype)
    return Reservation((_SIGNALS,), nbytes)


def prepare(
    group: Group,
    operands: Operands,
    sent: Sent,
    config: GemmConfig,
    mark: int,
    destination: Destination,
    *,
    tile_stores: bool = True,
) -> Launch:
    """Return the launch. Collective when the workspace must grow.

    Args:
        mark: The number from the ranks' agreement.
        destination: The output buffer that this rank's result goes to.
        tile_stores: Whether tiles travel by copies out of shared memory where the GPU has them;
            else by ordinary stores.
    """
    require(group.backend)
    from interlace.gemm.kernels.grants import OutputBuffers
    from interlace.operators.gemm_all_to_all import kernel

    ranks, me = group.world_size, group.rank
    # Tiles go straight into results, so the workspace is there for its signals.
    workspace = group.workspace(*_SIGNALS)
    # Rows for a rank come one rank after the other in x; in that rank's result they follow those of
    # the sources before this one.
    routes, first = [], 0
    for dest in range(ranks):
        before = sum(sent[source][dest] for source in range(me))
        routes.append((first, sent[me][dest], before))
        first += sent[me][dest]
    dtype = operands.out_dtype
    stride = launch.padded_columns(operands.columns, dtype)
    received = _received(sent)
    descriptors = launch.moves_tiles(group.device) and group.stride % 16 == 0
    part_rows = _part_rows(sent, max(received), config.block_m)
    tiles = None
    # A tile is stored as a whole, so a descriptor must know where the rows of its part end.
    if descriptors and tile_stores and part_rows and ranks > 1:
        sizes = [
            (BUFFERS + 1, destination.buffer_bytes // dtype.itemsize),
            (ceil_div(max(received), part_rows), part_rows * stride),
            (part_rows, stride),
            (operands.columns, 1),
        ]
        tiles = describe_ranks(
            group, destination.address, dtype, sizes, [config.block_m, config.block_n]
        )
    arguments = launch.operand_arguments(operands, config, descriptors) | {
        "tiles": tiles,
        "buffers": OutputBuffers(destination.address, destination.buffer_bytes),
        "own_buffer": destination.own_index,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(NAME),
        "routes": group.cache.tables.on_device(routes),
        "call": mark,
        "most_rows": max(max(counts) for counts in sent),
        "own_rows": received[me],
        "part_rows": part_rows or 1,
        "spread_ns": launch.spread_ns(config, operands.inner),
    }
    return Launch(
        kernel.gemm_all_to_all,
        (launch.programs(group, config),),
        arguments,
        launch.constants(
            operands, config, group, descriptors=descriptors, tile_stores=tiles is not None
        ),
        (operands,),
    )


def _part_rows(sent: Sent, most_received: int, block_m: int) -> int:
    """Return the rows of the parts of an output that no tile may reach beyond; 0 if there are no
    such parts.
    """
    counts = {count for of_source in sent for count in of_source}
    # As many rows from every source: a part for each.
    if len(counts) == 1:
        return max(counts)
    # Tiles end where the source's rows end, so the output may be a single part.
    return most_received if all(count % block_m == 0 for count in counts) else 0
