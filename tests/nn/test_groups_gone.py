"""Modules refuse to work after their process group was destroyed or replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.nn import (
    ColumnParallelLinear,
    EmbeddingTable,
    MoE,
    RowParallelLinear,
    ShardedEmbeddingBags,
)
from tests.errors import error_of

TABLES = [EmbeddingTable(name, 6, 4, bag_length=1) for name in ("a", "b")]


def _calls(group: dist.ProcessGroup | None) -> dict[str, Callable[[], Any]]:
    """Return a call of every kind of module, by name."""
    x = torch.ones(2, 8)
    column, row = ColumnParallelLinear(8, 4, group=group), RowParallelLinear(16, 4, group=group)
    scattered = RowParallelLinear(16, 4, sequence_parallel=True, group=group)
    moe, bags = MoE(8, 8, 4, group=group), ShardedEmbeddingBags(TABLES, group=group)
    return {
        "column": lambda: column(x),
        "row": lambda: row(x),
        "scattered": lambda: scattered(x),
        "moe": lambda: moe(x),
        "bags": lambda: bags(torch.tensor([0, 1, 2, 3])),
    }


def _after_a_group() -> dict[str, Any]:
    group = dist.new_group()
    calls = _calls(group)
    x = torch.ones(2, 8)
    calls["operator"] = lambda: interlace.gemm_all_reduce(x, x, group=group)
    calls["new layer"] = lambda: RowParallelLinear(16, 4, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    return {name: error_of(call) for name, call in calls.items()}


def test_a_destroyed_group(ranks: Any) -> None:
    for errors in ranks(2).run(_after_a_group):
        assert len(errors) == 7
        for name, error in errors.items():
            assert error is not None, name
            assert error[0] == "GroupError", (name, error)
            assert "must exist while it is used" in error[1]


def _after_the_default_group() -> dict[str, Any]:
    """Call modules without the default group, then with a default group of one rank."""
    calls = _calls(None)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    outcomes = {name: error_of(call) for name, call in calls.items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outcomes |= {f"{name}, replaced": error_of(call) for name, call in calls.items()}
    return {"rank": rank, "errors": outcomes}


def test_a_default_group_that_is_gone_or_another_one(quick_launches: None) -> None:
    """The modules would take this process alone for all ranks, and return a part of the result."""
    for outcome in interlace.launch(_after_the_default_group, 2, backend="cpu"):
        assert len(outcome["errors"]) == 10
        for name, error in outcome["errors"].items():
            assert error is not None, name
            assert error[0] == "GroupError", (name, error)
            expected = f"this one being rank {outcome['rank']} of 2; got rank 0 of 1"
            assert expected in error[1]
