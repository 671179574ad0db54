"""The ways to carry cuBLAS's or our product to its ranks: mapped outputs and copy engines."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from interlace.bench.benchmark import Way
from interlace.gemm.implementations.chunked import multiply_in_chunks
from interlace.gemm.operands import Operands
from interlace.mapped import Fused, empty_rotating, fuse
from interlace.mapped.layout import stride_of_rows
from interlace.mapped.output import ORDERS

if TYPE_CHECKING:
    from interlace.bench.products import TimedProduct


def carriers(case: TimedProduct) -> list[Way]:
    """Return every way that an operator has whose product may be written straight to the peers."""
    shape, owner = case.shape, case.owner
    if "remote_stores" not in case.operator.words or shape.rows % owner.world_size:
        return []
    ways = [chunked_way(case)]
    rows_of_rank, itemsize = shape.rows // owner.world_size, shape.dtype.itemsize
    # Of other shapes a matrix [M, N] over the peers' memory would mostly be padding.
    if stride_of_rows(rows_of_rank, shape.columns, itemsize, owner.granularity) is not None:
        ways = [*mapped_ways(case), *ways]
    return ways


def mapped_ways(case: TimedProduct) -> list[Way]:
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


def chunked_way(case: TimedProduct) -> Way:
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
