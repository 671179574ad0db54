"""Timing a call on all ranks of a group: CUDA-graph replays, the slowest rank, and how far ranks are apart."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one call in microseconds; each sample is the slowest rank's mean over a graph of calls.

    Attributes:
        median_us, p10_us, p90_us: over the samples.
        skew_us: median over samples of slowest minus fastest rank.
        samples: how many.
    """

    median_us: float
    p10_us: float
    p90_us: float
    skew_us: float
    samples: int


def measure(
    call: Callable[[int], object], *, calls: int = 20, samples: int = 11, group: dist.ProcessGroup | None = None
) -> Timing:
    """Time ``call(i)`` on the current CUDA device, on every rank of ``group`` at once.

    ``calls`` of them, with i = 0, 1, ..., are captured in one CUDA graph (let i choose among weights, so that they do not
    stay in the cache), which is replayed once untimed and then ``samples`` times between two events, the ranks aligned by
    a barrier before each.
    """
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(samples):
        dist.barrier(group)
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    mine = torch.tensor(times, device="cuda")
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, mine, group=group)
    return summarise(torch.stack(ranks).tolist())


def summarise(times_us: list[list[float]]) -> Timing:
    """``times_us[rank][sample]`` -> the slowest rank's statistics."""
    slowest = [max(sample) for sample in zip(*times_us, strict=True)]
    skew = [max(sample) - min(sample) for sample in zip(*times_us, strict=True)]
    ordered = sorted(slowest)
    return Timing(
        median_us=round(statistics.median(ordered), 2),
        p10_us=round(ordered[int(0.1 * (len(ordered) - 1))], 2),
        p90_us=round(ordered[-1 - int(0.1 * (len(ordered) - 1))], 2),
        skew_us=round(statistics.median(skew), 2),
        samples=len(slowest),
    )
