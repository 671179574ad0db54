"""Measure how much longer kernels take that record what they do (`interlace.trace`).

    python benchmarks/trace_overhead.py --ranks 2 --json overhead.json

For each call, its launches are captured in two CUDA graphs, with and without recording, which take
turns; the time is the median over replays on the slowest rank, as in ``interlace bench``. The exit
code is 1 if a call takes longer by more than it may: 10 % of a GEMV, 3 % of a product.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.comm.launching.kernels import Launch
from interlace.comm.replay import recording as recordings
from interlace.testing.cases import Case
from interlace.testing.cases.products import GemvCase, ProductCase

_CALLS = 20  # in a graph
_ROUNDS = 30
_SLEEP_CYCLES = 2_000_000

CASES: tuple[tuple[Case, float], ...] = (
    (GemvCase("gemv_all_reduce", "gemv one_shot", "bfloat16", False, 1, 8192, 3584), 1.10),
    (GemvCase("gemv_all_reduce", "gemv two_phase", "bfloat16", False, 1, 8192, 3584), 1.10),
    (ProductCase("gemm_reduce_scatter", "fused", "bfloat16", False, 8192, 8192, 1536), 1.03),
    (ProductCase("gemm_all_reduce", "fused", "bfloat16", False, 4096, 8192, 3072), 1.03),
    (ProductCase("gemm_all_to_all", "fused", "bfloat16", False, 8192, 8192, 1536), 1.03),
)
"""Calls whose work is launches alone, since a graph here has nothing else: ``all_gather_gemm``
waits for rows that copy engines bring. With each, how many times as long it may take. On an H200
the GEMV takes about 12 us and a product 300 us or more."""


@contextmanager
def _collecting(launches: list[Launch]) -> Iterator[None]:
    """Append every launch that is made within the context, with the context that it got."""
    call = Launch.__call__

    def collect(self: Launch) -> None:
        recording = recordings.active()
        if recording is not None:
            arguments = recording.arguments(self.kernel, self.grid[0], self.arguments)
            launches.append(dataclasses.replace(self, arguments=arguments))
        else:
            launches.append(self)
        call(self)

    Launch.__call__ = collect  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch.__call__ = call  # type: ignore[method-assign]


def _graph(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    """Return a graph of calls, compiled and run once before."""
    group = group_of(None)
    with group.running():
        for launch in launches:
            launch()
    group.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), group.running():
        for _ in range(_CALLS):
            for launch in launches:
                launch()
    return graph


def _time_us(graph: torch.cuda.CUDAGraph, meeting: torch.Tensor) -> float:
    """Return the time of one call of a graph on this rank, in microseconds."""
    group = group_of(None)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SLEEP_CYCLES)
    dist.all_reduce(meeting)
    with group.running():
        start.record()
        graph.replay()
        end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / _CALLS


def measure(case: Case) -> dict[str, Any]:
    """Return the times of a call without and with recording, on this rank. Collective."""
    group = group_of(None)
    tensors = case.tensors(group.rank, group.world_size, seed=0)
    inputs = {name: tensor.to(group.device) for name, tensor in tensors.items()}
    call: Callable[[Any], Any] = case.open(None)
    kept = [call(inputs)]  # memory grows now
    launches: dict[str, list[Launch]] = {"without": [], "with": []}
    with _collecting(launches["without"]):
        kept.append(call(inputs))
    group.synchronize()
    with recordings.recording(group.health), _collecting(launches["with"]):
        kept.append(call(inputs))
        group.synchronize()
    graphs = {name: _graph(of_name) for name, of_name in launches.items()}
    meeting = torch.zeros(1, device=group.device)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(_ROUNDS + 3):
        for name, graph in graphs.items():
            us = _time_us(graph, meeting)
            if turn >= 3:
                times[name].append(us)
    group.synchronize()
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def _run() -> list[dict[str, Any]]:
    results = []
    for case, most in CASES:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, measure(case))
        slowest = {name: max(times[name] for times in of_ranks) for name in of_ranks[0]}
        ratio = slowest["with"] / slowest["without"]
        results.append({"call": case.label, **slowest, "ratio": ratio, "most": most})
    return results


def main() -> int:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # A replayed call makes no launches that could be captured.
    os.environ["INTERLACE_REPLAY"] = "0"
    results = interlace.launch(_run, options.ranks, backend="cuda")[0]
    for result in results:
        verdict = "" if result["ratio"] <= result["most"] else "  TOO LONG"
        print(
            f"{result['call']}: {result['without']:.2f} us, recording {result['with']:.2f} us, "
            f"x {result['ratio']:.3f}{verdict}"
        )
    if options.json:
        documents.write(options.json, results)
    return int(any(result["ratio"] > result["most"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
