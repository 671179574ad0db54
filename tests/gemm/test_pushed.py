"""``impl="pushed"`` after a product: one kernel that stores rows in the peers' memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from tests.errors import error_of
from tests.gemm.calls import Call, check_all, check_gradients, differentiate, run

OPERATORS = ["gemm_all_to_all", "gemm_reduce_scatter"]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_matches_float64(ranks: Any, world_size: int, operator: str) -> None:
    """Every dtype; sizes that fill no tile and no vector; empty ones; the same memory again."""
    sizes = [
        (16, 24, 20, "float32", True, "K"),
        (4, 1, 1, "float32", False, "K"),
        (36, 1030, 5, "bfloat16", True, "N"),
        (0, 5, 7, "float32", True, "K"),
        (8, 0, 7, "float32", False, "K"),
        (8, 5, 0, "float32", True, "K"),
        (64, 1000, 12, "float16", True, "K"),
        (16, 24, 20, "float32", False, "N"),
    ]
    calls = [
        Call(operator, *size[:5], w_along=size[5], impl="pushed", seed=i)
        for i, size in enumerate(sizes)
    ]
    check_all(calls, ranks(world_size).run(run, calls))


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients(ranks: Any, operator: str) -> None:
    call = Call(operator, 8, 12, 6, impl="pushed", bias=True)
    check_gradients(call, ranks(2).run(differentiate, call))


def _worked_example() -> list[float]:
    """Products [1, 2] on rank 0 and [10, 20] on rank 1, as in the kernel's docstring."""
    x, w = torch.tensor([[1.0], [2.0]]), torch.full((1, 1), 10.0 if dist.get_rank() else 1.0)
    y = interlace.gemm_reduce_scatter(x, w, torch.tensor([100.0]), impl="pushed")
    z = interlace.gemm_all_to_all(x, w, impl="pushed")
    return [*y.flatten().tolist(), *z.flatten().tolist()]


def test_worked_example(ranks: Any) -> None:
    assert ranks(2).run(_worked_example) == [[111.0, 1.0, 10.0], [122.0, 2.0, 20.0]]


def _sent(operator: str) -> int:
    """Bytes that a call puts into the peers' memory."""
    group = interlace.group_of()
    x, w = torch.ones(16, 20), torch.ones(24, 20)
    getattr(interlace, operator)(x, w, impl="pushed")
    before = sum(group.traffic.bytes_to.values())
    getattr(interlace, operator)(x, w, impl="pushed")
    return sum(group.traffic.bytes_to.values()) - before


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_row_travels_once(ranks: Any, operator: str) -> None:
    """And a word for every peer that says which call it is."""
    assert ranks(4).run(_sent, operator) == [12 * 24 * 4 + 3 * 8] * 4


def _late(operator: str) -> tuple[str, int] | None:
    """The error on rank 0, and the rank that it names, where rank 1 does not make a second call."""
    process_group = dist.new_group()
    interlace.set_deadline(0.5, process_group)
    x, w = torch.ones(4, 3), torch.ones(5, 3)
    call = getattr(interlace, operator)
    call(x, w, impl="pushed", group=process_group)
    error = None
    if dist.get_rank() == 0:
        error = error_of(call, x, w, impl="pushed", group=process_group)
    dist.barrier()
    return error and (error[0], error[2]["peer"])


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_peer_that_never_calls(ranks: Any, operator: str) -> None:
    assert ranks(2).run(_late, operator)[0] == ("PeerTimeoutError", 1)


def _uneven(operator: str) -> str:
    """The error of a call whose seven rows do not divide evenly."""
    splits = {}
    if operator == "gemm_all_to_all":
        splits = {"input_splits": [3, 4], "output_splits": [(3, 4)[dist.get_rank()]] * 2}
    x, w = torch.ones(7, 3), torch.ones(5, 3)
    return error_of(getattr(interlace, operator), x, w, impl="pushed", **splits)[1]


@pytest.mark.parametrize("operator", OPERATORS)
def test_uneven_rows_are_refused(ranks: Any, operator: str) -> None:
    for message in ranks(2).run(_uneven, operator):
        assert "impl='pushed' must have rows that are split evenly" in message
