"""What carries a product to its ranks, on the memory of a benchmark: PyTorch's collectives by
themselves; and mapped outputs and copy engines, with cuBLAS's product.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from interlace.bench.benchmark import Step, Way
from interlace.comm import group_of
from interlace.comm.groups.process_groups import gather, scatter
from interlace.gemm.implementations.chunked import multiply_in_chunks
from interlace.gemm.implementations.stock import ONE_SHOT_BYTES
from interlace.gemm.operands import Operands
from interlace.mapped import COLLECTIVES as MAPPED_COLLECTIVES
from interlace.mapped import Fused, empty_rotating, fuse
from interlace.mapped.layout import stride_of_rows
from interlace.mapped.output import ORDERS

if TYPE_CHECKING:
    from interlace.bench.products import TimedProduct

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
"""Collectives that stock PyTorch has, and that are timed by themselves."""


def collectives(case: TimedProduct) -> dict[str, Step]:
    """Return the collective alone, by every library that has it, on the memory of the pair."""
    group, parts = case.group, case.product
    shard = parts[: case.shape.rows // case.owner.world_size]
    match case.operator.collective:
        case "all_to_all":
            return {"NCCL": lambda i: dist.all_to_all_single(case.received, parts, group=group)}
        case "reduce_scatter":
            return {"NCCL": lambda i: scatter(shard, case.received, group)}
        case "all_gather":
            return {"NCCL": lambda i: gather(case.gathered, case.operands(i)[0], group)}
        case "all_reduce":
            return _all_reduces(case)
    return {}


def _all_reduces(case: TimedProduct) -> dict[str, Step]:
    """Return the all-reduces of NCCL and of torch's symmetric memory."""
    size = tuple(case.product.shape)
    case.product, steps = symmetric_all_reduces(size, case.product.dtype, case.group)
    if case.product.nbytes > ONE_SHOT_BYTES:
        del steps["torch one-shot"]
    return {"NCCL": lambda i: dist.all_reduce(case.product, group=case.group), **steps}


def symmetric_all_reduces(
    size: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, dict[str, Step]]:
    """Return zeros in torch's symmetric memory, and torch's all-reduces of them by name."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    process_group = group or dist.group.WORLD
    assert process_group is not None
    name = process_group.group_name
    shared = symmetric_memory.empty(size, dtype=dtype, device=group_of(group).device)
    symmetric_memory.rendezvous(shared, name)
    shared.zero_()
    return shared, {
        "torch one-shot": lambda i: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name),
        "torch two-shot": lambda i: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name),
    }


def alone(case: TimedProduct) -> list[Way]:
    """Return the collectives as ways."""
    steps = collectives(case).items()
    return [Way(f"{name} alone", "communication", step) for name, step in steps]


def carriers(case: TimedProduct) -> list[Way]:
    """Return every way that an operator has whose product may be written straight to the peers."""
    shape, owner = case.shape, case.owner
    if case.operator.collective not in MAPPED_COLLECTIVES or shape.rows % owner.world_size:
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
