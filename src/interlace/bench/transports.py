"""Comparison of everything that carries a product's rows to their ranks.

Each way is timed, and its kernels are listed with the processors that they take.

*SM stores* and *tile stores* are the fused kernel's own, ordinary or by copies out of shared
memory; *mapped*, cuBLAS's ordinary stores; *copy engines*, after each part of cuBLAS's product, or
started by our product's counts; then torch's async-TP and NCCL. NCCL beside an independent product
is no way to run the operator: it shows what a collective of kernels takes from a product.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from interlace.bench import collectives
from interlace.bench.benchmark import Step, Way
from interlace.bench.carriers import carriers
from interlace.bench.kernel_times import kernels_of
from interlace.bench.products import ProductShape, TimedProduct, check_ways
from interlace.gemm.config import GemmConfig
from interlace.gemm.launch import padded_columns
from interlace.gemm.operands import Operands
from interlace.operators.gemm_all_to_all import GemmAllToAllConfig
from interlace.operators.gemm_all_to_all import fused as all_to_all
from interlace.operators.gemm_reduce_scatter import GemmReduceScatterConfig
from interlace.operators.gemm_reduce_scatter import fused as reduce_scatter

_PROFILED = 10  # calls


def compare(shape: ProductShape, config: GemmConfig | None = None) -> dict[str, Any]:
    """Check, time and profile every way. Collective; times are the same on every rank.

    Raises:
        InterlaceError: a way's result is wrong.
    """
    case = TimedProduct(shape)
    chosen = config or case.choice.config
    error = case.check(chosen)
    ours = [
        Way("fused, SM stores", "ours", _sm_stores(case, chosen)),
        *carriers(case),
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
        kernels = kernels_of(case.owner, way.call, _PROFILED)
        times[way.name]["kernels"] = [dataclasses.asdict(kernel) for kernel in kernels]
    return {
        "operator": shape.operator,
        "shape": str(shape),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "world_size": case.owner.world_size,
        "config": str(chosen),
        "relative_error": error,
        "ways": times,
    }


def _sm_stores(case: TimedProduct, config: GemmConfig) -> Step:
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


def _beside(case: TimedProduct) -> Step:
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


__all__ = ["compare"]
