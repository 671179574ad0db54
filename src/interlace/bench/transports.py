"""Comparison of everything that carries a product's rows to their ranks.

Each way is timed, and its kernels are listed with the processors that they take.

*SM stores* and *tile stores* are the fused kernel's own, ordinary or by copies out of shared
memory; *mapped*, cuBLAS's ordinary stores; *copy engines*, after each part of cuBLAS's product, or
started by our product's counts; then torch's async-TP and NCCL. NCCL beside an independent product
is no way to run the operator: it shows what a collective of kernels takes from a product.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from interlace.bench import collectives
from interlace.bench.benchmark import Step, Way
from interlace.bench.carriers import carriers
from interlace.bench.products import Case, Shape, check_ways
from interlace.gemm.config import GemmConfig
from interlace.gemm.launch import padded_columns
from interlace.gemm.operands import Operands
from interlace.operators.gemm_all_to_all import GemmAllToAllConfig
from interlace.operators.gemm_all_to_all import fused as all_to_all
from interlace.operators.gemm_reduce_scatter import GemmReduceScatterConfig
from interlace.operators.gemm_reduce_scatter import fused as reduce_scatter

_PIECES = (1, 2, 4)
_PROFILED = 10  # calls


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a call, on rank 0.

    Attributes:
        name: as the compiler has it, cut short.
        blocks: of its grid; a persistent kernel takes as many processors.
        median_us: by the profiler.
        each_call: launches in one call.
    """

    name: str
    blocks: int
    median_us: float
    each_call: float


def compare(shape: Shape, config: GemmConfig | None = None) -> dict[str, Any]:
    """Check, time and profile every way. Collective; times are the same on every rank.

    Raises:
        InterlaceError: a way's result is wrong.
    """
    case = Case(shape)
    chosen = config or case.choice.config
    error = case.check(chosen)
    rows = shape.rows // case.owner.world_size
    pieces = tuple(count for count in _PIECES if rows % count == 0)
    ours = [
        Way("fused, SM stores", "ours", _sm_stores(case, chosen)),
        *carriers(case, chosen, pieces),
    ]
    check_ways(case, ours)
    ways = [
        Way("fused, tile stores", "ours", lambda i: case.call(i, "fused", chosen), "fused"),
        *ours,
        *(way for way in case.implementations(chosen) if way.role == "pair"),
        *collectives.alone(case),
        Way("cuBLAS alone", "compute", case.multiply),
        Way("cuBLAS beside NCCL, independent", "pair", _beside(case)),
    ]
    # All are timed before any is profiled: a profiler, once it has run, may slow down later calls.
    times = case.time(ways)
    for way in ways:
        kernels_of_way = _profile(case, way.call)
        times[way.name]["kernels"] = [dataclasses.asdict(kernel) for kernel in kernels_of_way]
    return {
        "operator": shape.operator,
        "shape": str(shape),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "world_size": case.owner.world_size,
        "config": str(chosen),
        "relative_error": error,
        "ways": times,
    }


def _sm_stores(case: Case, config: GemmConfig) -> Step:
    """Return the fused kernel with ordinary stores to peers instead of copies of tiles."""
    owner, shape, ranks = case.owner, case.shape, case.owner.world_size
    mark = owner.agree(shape.operator, transport="SM stores", shape=str(shape), config=str(config))
    sets = [Operands(x, w, None, None, None, shape.dtype).for_kernel() for x, w in case.sets]
    stride, rows = padded_columns(shape.columns, shape.dtype), shape.rows // ranks

    def scatter(i: int) -> torch.Tensor:
        y = case.product.new_empty([rows, stride])
        launch = reduce_scatter.prepare(
            owner,
            sets[i % len(sets)],
            [rows] * ranks,
            y,
            GemmReduceScatterConfig.parse(str(config)),
            mark,
            tile_stores=False,
        )
        with owner.running():
            launch()
        return y[:, : shape.columns]

    def send(i: int) -> torch.Tensor:
        output = owner.outputs.take(shape.rows * stride * shape.dtype.itemsize)
        launch = all_to_all.prepare(
            owner,
            sets[i % len(sets)],
            [[rows] * ranks] * ranks,
            GemmAllToAllConfig.parse(str(config)),
            mark,
            output.destination,
            tile_stores=False,
        )
        with owner.running():
            launch()
        return output.tensor([shape.rows, stride], shape.dtype, owner.device)[:, : shape.columns]

    return scatter if case.operator.adds_ranks else send


def _beside(case: Case) -> Step:
    side = torch.cuda.Stream() if case.owner.backend == "cuda" else None
    collective = collectives.collectives(case)["NCCL"]
    # The collective reads and writes the case's memory, so the product has memory of its own.
    independent = torch.empty_like(case.product)

    def call(i: int) -> None:
        x, w = case.sets[i % len(case.sets)]
        if side is None:
            collective(i)
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                collective(i)
        torch.mm(x, w.T, out=independent)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    return call


# Kernels


def _profile(case: Case, step: Step) -> list[Kernel]:
    """Return the kernels of a call on this rank, those that take longest first.

    There are none on the CPU, or if the profiler may not look.
    """
    from torch.profiler import ProfilerActivity, profile

    case.owner.synchronize()
    if case.owner.backend == "cpu":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(_PROFILED):
            step(i)
        case.owner.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return kernels(events, _PROFILED)


def kernels(events: Iterable[Mapping[str, Any]], calls: int) -> list[Kernel]:
    """Return the kernels of a Chrome trace of ``calls`` calls, those that take longest first.

    Copies by copy engines have no blocks.
    """
    durations: dict[tuple[str, int], list[float]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            blocks = math.prod(event.get("args", {}).get("grid", [0]))
            durations.setdefault((str(event["name"])[:60], blocks), []).append(float(event["dur"]))
    listed = [
        Kernel(name, blocks, round(statistics.median(times), 2), round(len(times) / calls, 2))
        for (name, blocks), times in durations.items()
    ]
    return sorted(listed, key=lambda kernel: -kernel.median_us * kernel.each_call)


__all__ = ["Kernel", "compare", "kernels"]
