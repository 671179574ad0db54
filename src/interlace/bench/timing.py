"""Timing on all ranks of a group: of calls in CUDA graphs, and of steps from the host."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from interlace.comm import group_of

# Long enough for a host to enqueue an all-reduce, two events and a graph.
_SLEEP_CYCLES = 2_000_000

_SETTLING = 16
"""Steps until memory comes again at the same addresses, and until calls that come again, which are
graphs after eleven (:meth:`interlace.comm.replay.replays.Replays.comes_again`), are replayed.
"""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one call in microseconds.

    Each sample is the slowest rank's, and the mean of a graph's calls.

    Attributes:
        median_us, p10_us, p90_us: Median and percentiles over the samples.
        skew_us: Median over samples of slowest minus fastest rank.
        samples: Number of samples.
    """

    median_us: float
    p10_us: float
    p90_us: float
    skew_us: float
    samples: int


def measure(
    call: Callable[[int], object],
    *,
    period: int = 1,
    samples: int = 15,
    graph_us: float = 1500.0,
    group: dist.ProcessGroup | None = None,
) -> Timing:
    """Time ``call(i)`` on the current CUDA device, on every rank of ``group`` at once.

    Calls with i = 0, 1, ... are captured in one CUDA graph of about ``graph_us``, their number a
    multiple of ``period`` (let i choose among that many weights, so that none stays in the cache).
    The graph is replayed once untimed and then ``samples`` times between two events. Before each,
    the GPUs sleep while the hosts enqueue everything, and then meet in a small all-reduce: what is
    timed starts on all ranks within a microsecond or two.

    Raises:
        BackendError: ranks share a GPU.
    """
    group_of(group).require_own_gpus("a measurement")
    # The first calls compile kernels and exchange addresses, which no graph can capture.
    for i in range(3):
        call(i)
    probe = torch.tensor(
        _elapsed_us(lambda: [call(i) for i in range(period)], group) / period, device="cuda"
    )
    # All ranks must capture equally many calls, since calls wait for one another.
    dist.all_reduce(probe, op=dist.ReduceOp.MAX, group=group)
    calls = period * max(1, round(graph_us / max(probe.item(), 1.0) / period))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    # The first replay uploads the graph.
    graph.replay()
    return _of_all_ranks([_elapsed_us(graph.replay, group) / calls for _ in range(samples)], group)


def measure_step(step: Callable[[], object], *, samples: int = 20) -> Timing:
    """Time ``step()`` as a program runs it, kernel by kernel, on all ranks at once.

    It runs sixteen times untimed, until calls that come again are graphs, and then ``samples``
    times, each of which starts as in :func:`measure`. What the host takes beyond the GPU's sleep of
    about a millisecond counts, as it does in a program.

    Raises:
        BackendError: ranks share a GPU.
    """
    group_of().require_own_gpus("a measurement")
    for _ in range(_SETTLING):
        step()
    return _of_all_ranks([_elapsed_us(step, None) for _ in range(samples)], None)


def host_us(
    call: Callable[[int], object],
    *,
    device: torch.device,
    calls: int = 10,
    samples: int = 5,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the microseconds that the host takes to enqueue ``call(i)``: the slowest median.

    A program without CUDA graphs is as slow as its host where that takes longer than the GPU.

    On GPUs as many calls run sixteen times untimed before, as :func:`measure_step` has it.

    Args:
        calls: In a row, as many as fit in the GPU's queue.
    """
    for _ in range(_SETTLING if device.type == "cuda" else 0):
        for i in range(calls):
            call(i)
        _wait_for(device)
    times = []
    for _ in range(samples):
        _wait_for(device)
        dist.barrier(group)
        start = time.perf_counter()
        for i in range(calls):
            call(i)
        times.append((time.perf_counter() - start) / calls * 1e6)
    _wait_for(device)
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return round(slowest.item(), 1)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _of_all_ranks(times_us: list[float], group: dist.ProcessGroup | None) -> Timing:
    times = torch.tensor(times_us, device="cuda")
    ranks = [torch.empty_like(times) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, times, group=group)
    return summarise(torch.stack(ranks).tolist())


def _elapsed_us(run: Callable[[], object], group: dist.ProcessGroup | None) -> float:
    """Return the time of ``run`` on this rank's GPU, in microseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    meeting = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    dist.barrier(group)
    # The GPUs sleep while the hosts enqueue everything, and then meet in the all-reduce.
    torch.cuda._sleep(_SLEEP_CYCLES)
    dist.all_reduce(meeting, group=group)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def summarise(times_us: list[list[float]]) -> Timing:
    """Return the slowest rank's statistics of ``times_us[rank][sample]``."""
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
