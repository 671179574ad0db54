"""Time calls as programs make them: what they cost the host, how long they last, and in a graph.

Each sample is the slowest rank's; of samples come the median, the 10th and the 90th percentile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from interlace.bench.timing import measure

SAMPLES = 15

Call = Callable[[int], object]
Unit = Literal["us", "ms"]
Spread = dict[str, float]
"""``median_us``, ``p10_us`` and ``p90_us``, or the same with ``_ms``."""

_SCALES: Mapping[Unit, tuple[float, int]] = {"us": (1.0, 1), "ms": (1e-3, 3)}
"""What microseconds are multiplied by, and the digits that are kept."""


class Sample(NamedTuple):
    """One sample of this rank, per call.

    Attributes:
        host_us: What it takes the host to enqueue a call.
        eager_us: How long a call lasts on the GPU, with the host's time in it where that is longer.
    """

    host_us: float
    eager_us: float


def sample(call: Call, calls: int = 1) -> Sample:
    """Time ``call(0)``, ``call(1)`` and so on, so many in a row, right after ranks have met."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    for i in range(calls):
        call(i)
    host_us = (time.perf_counter() - began) / calls * 1e6
    end.record()
    torch.cuda.synchronize()
    return Sample(host_us, start.elapsed_time(end) / calls * 1e3)


def spread(times_us: list[float], unit: Unit = "us") -> Spread:
    """Return the median and the deciles of samples, of each the slowest rank's. Collective."""
    slowest = torch.tensor(times_us, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    deciles = statistics.quantiles(slowest.tolist(), n=10)
    return _named(statistics.median(slowest.tolist()), deciles[0], deciles[-1], unit)


def spreads(samples: list[Sample], unit: Unit = "us") -> dict[str, Spread]:
    """Return the spread of the ``host``'s times and of ``eager`` ones. Collective."""
    host_us, eager_us = (list(times) for times in zip(*samples, strict=True))
    return {"host": spread(host_us, unit), "eager": spread(eager_us, unit)}


def in_turn(
    ways: Mapping[str, Call], *, calls: int, settling: int, unit: Unit = "us"
) -> dict[str, dict[str, Spread]]:
    """Return the spreads of ways by name. They take turns, as other programs of the host disturb
    all alike.

    Args:
        ways: The calls by name.
        calls: Calls in a row of which a sample is the mean.
        settling: Calls of each way before, until memory comes again at the same addresses.
        unit: The unit of the result.
    """
    for call in ways.values():
        for i in range(settling):
            call(i)
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    for _ in range(SAMPLES):
        for name, call in ways.items():
            samples[name].append(sample(call, calls))
    return {name: spreads(samples[name], unit) for name in ways}


def in_graph(call: Call, *, period: int = 1, unit: Unit = "us") -> Spread:
    """Return the spread of calls in a CUDA graph; see :func:`interlace.bench.timing.measure`."""
    timing = measure(call, period=period)
    return _named(timing.median_us, timing.p10_us, timing.p90_us, unit)


def _named(median_us: float, p10_us: float, p90_us: float, unit: Unit) -> Spread:
    scale, digits = _SCALES[unit]
    times_us = {"median": median_us, "p10": p10_us, "p90": p90_us}
    return {f"{name}_{unit}": round(scale * us, digits) for name, us in times_us.items()}
