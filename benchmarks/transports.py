"""``interlace bench OPERATOR --transports``: all that carries a product's rows to their ranks.

Each way is timed, and its kernels are listed with the processors that they take.

*SM stores* and *tile stores* are the fused kernel's own, ordinary or by copies out of shared
memory; *mapped*, cuBLAS's ordinary stores; *copy engines*, after each part of cuBLAS's product, or
started by our product's counts; then torch's async-TP and NCCL. NCCL beside an independent product
is no way to run the operator: it shows what a collective of kernels takes from a product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from rich.table import Table

from benchmarks.kernels import kernels_of
from interlace.bench import carriers
from interlace.bench.benchmark import Step, Way
from interlace.bench.products import ProductShape, TimedProduct, check_ways
from interlace.bench.report import role_of, table_of
from interlace.gemm.config import GemmConfig
from interlace.gemm.implementations.chunked import multiply_in_chunks
from interlace.gemm.launch import padded_columns
from interlace.gemm.operands import Operands
from interlace.mapped import Fused, empty_rotating, fuse
from interlace.mapped.layout import stride_of_rows
from interlace.mapped.output import ORDERS
from interlace.operators.gemm_all_to_all import GemmAllToAllConfig
from interlace.operators.gemm_all_to_all import fused as all_to_all
from interlace.operators.gemm_reduce_scatter import GemmReduceScatterConfig
from interlace.operators.gemm_reduce_scatter import fused as reduce_scatter

_PROFILED = 10  # calls


def measure(work: tuple[str, int, int, int], *, dtype: str) -> list[dict[str, Any]]:
    """Compare the ways of one product ``(operator, M, N, K)``; collective."""
    return [compare(ProductShape(*work, getattr(torch, dtype)))]


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
        *_carriers(case),
    ]
    check_ways(case, ours)
    ways = [
        Way("fused, tile stores", "ours", lambda i: case.call(i, "fused", chosen), "fused"),
        *ours,
        *(way for way in case.implementations(chosen) if way.role == "pair"),
        *carriers.alone(case),
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


def _carriers(case: TimedProduct) -> list[Way]:
    """Return the ways to send cuBLAS's product, with rows that the ranks divide: mapped outputs and
    copy engines.
    """
    shape, owner = case.shape, case.owner
    if shape.rows % owner.world_size:
        return []
    ways = [_chunked_way(case)]
    rows_of_rank, itemsize = shape.rows // owner.world_size, shape.dtype.itemsize
    # Of other shapes a matrix [M, N] over the peers' memory would mostly be padding.
    if stride_of_rows(rows_of_rank, shape.columns, itemsize, owner.granularity) is not None:
        ways = [*_mapped_ways(case), *ways]
    return ways


def _mapped_ways(case: TimedProduct) -> list[Way]:
    """Return unchanged cuBLAS that stores to the peers' memory, in both orders of rows."""
    shape = (case.shape.rows, case.shape.columns)
    ways = []
    for order in ORDERS:
        run = fuse(
            torch.mm, case.operator.collective, shape=shape, dtype=case.shape.dtype,
            order=order, group=case.group
        )  # fmt: skip
        sources = [x for x, _ in case.sets]
        # In the rotated order each rank begins with the next rank's rows, so no peer is flooded.
        if order == "rotated":
            inputs = [
                empty_rotating(
                    (case.shape.rows, case.shape.inner), dtype=case.shape.dtype, group=case.group
                )
                for _ in sources
            ]
            for source, x in zip(inputs, sources, strict=True):
                source.natural.copy_(x)
            sources = [source.rotated for source in inputs]
        call = functools.partial(_run_mapped, run, sources, [w for _, w in case.sets])
        ways.append(Way(f"cuBLAS, mapped output, {order}", "ours", call))
    return ways


def _run_mapped(
    run: Fused, sources: list[torch.Tensor], weights: list[torch.Tensor], i: int
) -> torch.Tensor:
    return run(sources[i % len(sources)], weights[i % len(weights)].T)


def _chunked_way(case: TimedProduct) -> Way:
    """Return cuBLAS for each rank's rows, and copy engines."""
    dtype = case.shape.dtype
    run = fuse(
        functools.partial(multiply_in_chunks, case.owner),
        case.operator.collective,
        shape=_shape_by_rank(case),
        dtype=dtype,
        transport="copy_engine",
        group=case.group,
    )
    sets = [Operands(x, w, None, None, None, dtype) for x, w in case.sets]
    return Way("cuBLAS in parts, copy engines", "ours", lambda i: run(sets[i % len(sets)], False))


def _shape_by_rank(case: TimedProduct) -> tuple[int, int, int]:
    ranks = case.owner.world_size
    return ranks, case.shape.rows // ranks, case.shape.columns


def _beside(case: TimedProduct) -> Step:
    side = torch.cuda.Stream() if case.owner.backend == "cuda" else None
    collective = carriers.collectives(case)["NCCL"]
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


def table(operator: str, result: Mapping[str, Any]) -> Table:
    """Return a table of every way to carry a product to its ranks, with its kernels."""
    left = ("way", "kernels: blocks, us")
    headings = (left[0], "median us", "p10 - p90 us", "over cuBLAS alone us", left[1])
    view = table_of(operator, result, headings, left)
    alone = result["ways"]["cuBLAS alone"]["median_us"]
    for name, way in sorted(result["ways"].items(), key=lambda item: item[1]["median_us"]):
        is_part = role_of(way)[0] in ("compute", "communication")
        view.add_row(
            name,
            f"{way['median_us']:.1f}",
            f"{way['p10_us']:.1f} - {way['p90_us']:.1f}",
            "" if is_part else f"{way['median_us'] - alone:+.1f}",
            "\n".join(
                f"{kernel['name'][:28]}: {kernel['blocks'] or 'no'} blocks, "
                f"{kernel['each_call']:g} x {kernel['median_us']:.1f}"
                for kernel in way["kernels"][:4]
            ),
        )
    view.caption = f"configuration {result['config']}; kernels by the profiler, on rank 0"
    return view
