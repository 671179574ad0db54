"""The kernels of a call, by the profiler."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from interlace.comm import Group


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a call, on one rank.

    Attributes:
        name: The compiler's name, cut short.
        blocks: Number of blocks of its grid; a persistent kernel occupies as many processors.
        median_us: Duration by the profiler. It includes the kernel's waits for peers.
        each_call: Launches per call.
        gap_us: Median time from the end of all earlier kernels to the kernel's start; negative
            where it starts before they have ended.
    """

    name: str
    blocks: int
    median_us: float
    each_call: float
    gap_us: float = 0.0


def kernels_of(
    owner: Group, step: Callable[[int], object], runs: int, calls_per_run: int = 1
) -> list[Kernel]:
    """Return the kernels of a call on this rank, the longest first.

    There are none on the CPU, or if the profiler may not look. A profiler that has run once may
    slow down later calls, so time all calls before profiling one.

    Args:
        owner: The group of the call.
        step: Enqueues the i-th run, eagerly or as a CUDA graph.
        runs: Number of runs.
        calls_per_run: Calls of the operator in a run.
    """
    from torch.profiler import ProfilerActivity, profile

    owner.synchronize()
    if owner.backend == "cpu":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(runs):
            step(i)
        owner.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return kernels(events, runs * calls_per_run)


def kernels(events: Iterable[Mapping[str, Any]], calls: int) -> list[Kernel]:
    """Return the kernels of a Chrome trace of ``calls`` calls, the longest first.

    Copies by copy engines have no blocks.
    """
    durations: dict[tuple[str, int], list[float]] = {}
    gaps: dict[tuple[str, int], list[float]] = {}
    known = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    end: float | None = None
    for event in sorted(known, key=lambda event: float(event.get("ts", 0.0))):
        blocks = math.prod(event.get("args", {}).get("grid", [0]))
        key = str(event["name"])[:60], blocks
        start, duration = float(event.get("ts", 0.0)), float(event["dur"])
        durations.setdefault(key, []).append(duration)
        # Nothing is known of what came before the first kernel.
        gaps.setdefault(key, []).extend([] if end is None else [start - end])
        end = start + duration if end is None else max(end, start + duration)
    listed = [
        Kernel(
            *key,
            round(statistics.median(times), 2),
            round(len(times) / calls, 2),
            round(statistics.median(gaps[key] or [0.0]), 2),
        )
        for key, times in durations.items()
    ]
    return sorted(listed, key=lambda kernel: -kernel.median_us * kernel.each_call)
