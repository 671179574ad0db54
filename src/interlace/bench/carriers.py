"""Collectives by themselves, as they carry a product to its ranks, on the memory of a benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from interlace.bench.benchmark import Step, Way
from interlace.comm import group_of
from interlace.comm.groups.process_groups import gather, scatter

if TYPE_CHECKING:
    from interlace.bench.products import TimedProduct

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
"""Collectives that stock PyTorch has, and that are timed by themselves."""


def collectives(case: TimedProduct) -> dict[str, Step]:
    """Return the collective alone, by every library that has it, on the memory of the pair; none
    where ranks have different numbers of rows.
    """
    group, parts = case.group, case.product
    if case.shape.rows % case.owner.world_size and case.operator.collective != "all_reduce":
        return {}
    shard = parts[: case.shape.rows // case.owner.world_size]
    match case.operator.collective:
        case "all_to_all":
            return {"NCCL": lambda i: dist.all_to_all_single(case.received, parts, group=group)}
        case "reduce_scatter":
            return {"NCCL": lambda i: scatter(shard, case.received, group)}
        case "all_gather":
            # Bytes: not every library knows float8.
            is_narrow = case.gathered.element_size() == 1
            kind = torch.uint8 if is_narrow else case.gathered.dtype
            gathered = case.gathered.view(kind)
            return {"NCCL": lambda i: gather(gathered, case.operands(i)[0].view(kind), group)}
        case "all_reduce":
            return _all_reduces(case)
    return {}


def _all_reduces(case: TimedProduct) -> dict[str, Step]:
    """Return the all-reduces of NCCL and of torch's symmetric memory."""
    size = tuple(case.product.shape)
    case.product, steps = symmetric_all_reduces(size, case.product.dtype, case.group)
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
