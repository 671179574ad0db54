"""The work of each rank of ``interlace trace``."""

from __future__ import annotations

import torch.distributed as dist

import interlace
from interlace.cli.ranks import advance
from interlace.comm import group_of
from interlace.testing.cases import Case
from interlace.tracing import Trace


def trace_rank(folder: str, case: Case, calls: int) -> Trace | None:
    """Trace calls on this rank; return the trace, which has all ranks' events, on the first one.

    Collective.
    """
    group = group_of(None)
    tensors = case.tensors(group.rank, group.world_size, seed=0)
    inputs = {name: tensor.to(group.device) for name, tensor in tensors.items()}
    call = case.open(None)
    # Kernels are compiled for a trace at their first call in one.
    with interlace.trace():
        call(inputs)
    dist.barrier()
    with interlace.trace() as trace:
        for _ in range(calls):
            call(inputs)
    advance(folder)
    return trace if group.rank == 0 else None
