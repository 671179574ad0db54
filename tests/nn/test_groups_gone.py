"""Modules refuse to work after their process group was destroyed or replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.gemm.reference import exchange_rows
from interlace.nn import (
    ColumnParallelLinear,
    EmbeddingTable,
    LinearCrossEntropyLoss,
    MoE,
    RowParallelLinear,
    ShardedEmbeddingBags,
    UlyssesAttention,
)
from interlace_dlrm.metrics import gather_rows
from tests.errors import error_of

TABLES = [EmbeddingTable(name, 6, 4, bag_length=1) for name in ("a", "b")]


def _calls(group: dist.ProcessGroup | None) -> dict[str, Callable[[], Any]]:
    """Return a call of every kind of module, by name."""
    x = torch.ones(2, 8)
    column, row = ColumnParallelLinear(8, 4, group=group), RowParallelLinear(16, 4, group=group)
    scattered = RowParallelLinear(16, 4, sequence_parallel=True, group=group)
    loss, target = LinearCrossEntropyLoss(8, 4, group=group), torch.zeros(2, dtype=torch.int64)
    moe, bags = MoE(8, 8, 4, group=group), ShardedEmbeddingBags(TABLES, group=group)
    attention = UlyssesAttention(8, 2, group=group)
    return {
        "attention": lambda: attention(x),
        "column": lambda: column(x),
        "row": lambda: row(x),
        "scattered": lambda: scattered(x),
        "loss": lambda: loss(x, target),
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
        assert len(errors) == 9
        for name, error in errors.items():
            assert error is not None, name
            assert error[0] == "GroupError", (name, error)
            assert "must exist while it is used" in error[1]


def _alone() -> dict[str, Callable[[], Any]]:
    """Return calls that are given no process group, by name."""
    x, w, indices = torch.ones(2, 8), torch.ones(4, 8), torch.arange(4)
    experts = torch.ones(1, 8, 2, 8), torch.ones(1, 8, 8)
    routing = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    return {
        "product": lambda: interlace.gemm_all_reduce(x, w),
        "unfused": lambda: interlace.gemm_reduce_scatter(x, w, impl="unfused"),
        "decoding": lambda: interlace.gemv_all_reduce(x, w, impl="unfused"),
        "embedding": lambda: interlace.embedding_all_to_all([w], indices[:2], indices[:3]),
        "loss of an operator": lambda: interlace.linear_cross_entropy(x, w, indices[:2]),
        "experts": lambda: interlace.mixture_of_experts(x, *routing, *experts),
        "explain": lambda: interlace.explain("gemm_all_reduce", x, w),
        "layer": lambda: RowParallelLinear(8, 4)(x),
        "memory": lambda: interlace.empty_symmetric(4, dtype=x.dtype),
        "reference": lambda: exchange_rows(x, [2], [2], None),
        "metric": lambda: gather_rows(x),
        "compiled": lambda: torch.compile(interlace.gemm_all_reduce, backend="eager")(x, w),
    }


def _errors(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: error_of(call) for name, call in calls.items()}


def _after_the_default_group() -> dict[str, Any]:
    """Call modules and operators without the default group, with one of one rank, and so on."""
    calls = _calls(None)
    rank = dist.get_rank()
    os.environ["WORLD_SIZE"] = "2"  # as torchrun sets it
    single = dist.new_group([rank], use_local_synchronization=True)
    outcomes = {"single": error_of(lambda: RowParallelLinear(8, 4, group=single)(torch.ones(2, 8)))}
    dist.barrier()
    dist.destroy_process_group()
    outcomes["launched"] = _errors(_alone())
    del os.environ["WORLD_SIZE"]
    outcomes["destroyed"] = _errors({**_alone(), **calls})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outcomes["replaced"] = _errors(calls)
    # A process that has had no peers goes on alone.
    interlace.gemm_all_reduce(torch.ones(2, 8), torch.ones(4, 8))
    dist.destroy_process_group()
    outcomes["alone"] = _errors(_alone())
    os.environ["WORLD_SIZE"] = "1"
    outcomes["launched alone"] = _errors(_alone())
    return {"rank": rank, **outcomes}


def test_calls_without_the_default_group(quick_launches: None) -> None:
    """They would take this process alone for all ranks, and return a part of the result."""
    for outcome in interlace.launch(_after_the_default_group, 2, backend="cpu"):
        assert outcome["single"] is None
        for name, error in outcome["launched"].items():
            assert error[0] == "GroupError", (name, error)
            assert (
                "must exist in each of several processes; got none, and WORLD_SIZE is 2. Call"
                in (error[1])
            )
        assert len(outcome["destroyed"]) == 19
        for name, error in outcome["destroyed"].items():
            assert error[0] == "GroupError", (name, error)
            assert (
                "must exist while it is used; got none, as the default one was destroyed"
                in (error[1])
            )
        for name, error in outcome["replaced"].items():
            assert error[0] == "GroupError", (name, error)
            expected = f"this one being rank {outcome['rank']} of 2; got rank 0 of 1"
            assert expected in error[1]
        for when in ("alone", "launched alone"):
            assert dict.fromkeys(_alone()) == outcome[when]


def _destroy_before_the_first_call() -> Any:
    dist.barrier()
    dist.destroy_process_group()
    return error_of(lambda: interlace.gemm_all_reduce(torch.ones(2, 8), torch.ones(4, 8)))


def test_a_default_group_that_was_destroyed_before_the_first_call(quick_launches: None) -> None:
    for error in interlace.launch(_destroy_before_the_first_call, 2, backend="cpu"):
        assert error is not None
        assert error[0] == "GroupError"
