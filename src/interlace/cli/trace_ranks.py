"""The work of each rank of ``interlace trace``."""

from __future__ import annotations

import time

import interlace
from interlace.cli.ranks import advance
from interlace.comm import group_of
from interlace.testing.cases import Case
from interlace.tracing import Trace

_HOLD = 3.0  # times as long as the slowest host takes to enqueue the calls
_MIN_HOLD_S = 2e-3


def trace_rank(folder: str, case: Case, calls: int) -> Trace | None:
    """Trace calls on this rank; return the trace, which has all ranks' events, on the first one.

    On GPUs the calls begin on all ranks at once, behind the time that hosts take to enqueue them.
    Collective.
    """
    group = group_of(None)
    tensors = case.tensors(group.rank, group.world_size, seed=0)
    inputs = {name: tensor.to(group.device) for name, tensor in tensors.items()}
    call = case.open(None)

    def traced(hold_s: float) -> tuple[Trace, float]:
        """Return a trace of the calls, and the seconds that this host took to enqueue them."""
        with interlace.trace(hold_s=hold_s) as trace:
            start = time.perf_counter()
            for _ in range(calls):
                call(inputs)
            seconds = time.perf_counter() - start
        return trace, seconds

    # Kernels are compiled for a trace at their first call in one.
    traced(0.0)
    hold_s = 0.0
    if group.backend == "cuda":
        _, seconds = traced(_MIN_HOLD_S)
        hold_s = max(_HOLD * max(group.exchange("tracing calls", seconds)), _MIN_HOLD_S)
    trace, _ = traced(hold_s)
    advance(folder)
    return trace if group.rank == 0 else None
