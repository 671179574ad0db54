"""The work of each rank of ``interlace trace``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import interlace
from interlace.cli.ranks import advance
from interlace.comm import group_of
from interlace.testing.cases import Case
from interlace.units import format_ns


def trace_rank(folder: str, case: Case, calls: int) -> tuple[dict[str, Any], str]:
    """Trace calls on this rank; return the document for Perfetto, and a summary. Collective."""
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
    lines = [trace.summary()]
    if trace.is_timed:
        errors = [format_ns(clock.error_ns) for clock in trace.clocks[1:]]
        lines.append(f"clocks against rank 0's: within {', '.join(errors)}")
    return trace.to_perfetto() if group.rank == 0 else {}, "\n".join(lines)
