"""The work of each rank in a step of ``interlace demo``: ``torch.mm`` writes to its peers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from interlace.cli.ranks import advance
from interlace.comm import Group, group_of
from interlace.mapped import MappedOutput

_REPEATS = 15


def run_rank(folder: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Multiply into the peers' memory; return a report for JSON.

    For comparison, multiply into memory of this rank and then run an all-to-all.
    """
    group = group_of()
    rows, columns, inner = shape
    dtype = torch.float32 if group.backend == "cpu" else torch.bfloat16
    generator = torch.Generator(group.device).manual_seed(group.rank)
    x = torch.randn(rows, inner, generator=generator, device=group.device).to(dtype)
    w = torch.randn(columns, inner, generator=generator, device=group.device).to(dtype)
    out = MappedOutput((rows, columns), dtype=dtype)
    local, received = (
        torch.empty(rows, columns, dtype=dtype, device=group.device) for _ in range(2)
    )

    def mapped() -> torch.Tensor:
        torch.mm(x, w.T, out=out.begin())
        return out.exchange().flatten(0, 1)

    def unfused() -> torch.Tensor:
        torch.mm(x, w.T, out=local)
        if group.world_size > 1:
            dist.all_to_all_single(received, local)
            return received
        return local

    is_equal = bool(torch.equal(mapped(), unfused()))
    times = {
        "mapped": _time(group, mapped),
        "unfused": _time(group, unfused),
        "compute alone": _time(group, lambda: torch.mm(x, w.T, out=local)),
    }
    # The producer alone is timed without the exchange, so it stores to one epoch over and over.
    target = out.begin()
    times["producer"] = _time(group, lambda: torch.mm(x, w.T, out=target))
    out.exchange()
    advance(folder)
    sent_bytes = (group.world_size - 1) * (rows // group.world_size) * columns * dtype.itemsize
    return {"rank": group.rank, "same": is_equal, "times_ms": times, "bytes": sent_bytes}


def _time(group: Group, step: Callable[[], torch.Tensor]) -> float:
    """Median milliseconds of one call, the ranks beginning together."""
    times = []
    for _ in range(_REPEATS):
        if group.world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        step()
        group.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)
