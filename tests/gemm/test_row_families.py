"""Ranks agree once on calls that differ in their rows alone, and still find different rows."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.cli.gpus import gpu_named
from interlace.comm import process_group_named
from interlace.comm.groups.group import Group
from interlace.comm.host.agreement import Family
from interlace.costs import known_profiles
from interlace.costs.known_profiles import profile_of
from interlace.gemm import decision, dispatch
from interlace.gemm.choice import by_class, rows_of_class
from interlace.gemm.operator import product_operator
from interlace.operators.gemm_all_reduce import GemmAllReduce
from tests.asked import asked
from tests.errors import error_of


def _call(group: Group, rows: int, impl: str = "auto") -> torch.Tensor:
    process_group = process_group_named(group.name)
    return interlace.gemm_all_reduce(
        torch.ones(rows, 8), torch.ones(8, 8), group=process_group, impl=impl
    )


def _asked_in_calls() -> list[str]:
    """The exchanges of calls of many numbers of rows, by implementations with and without marks."""
    group = interlace.group_of(dist.new_group())
    with asked() as labels:
        for impl in ("auto", "unfused"):
            for rows in (4, 5, 6, 7, 4, 9):
                y = _call(group, rows, impl)
                assert torch.equal(y, torch.full_like(y, 8.0 * dist.get_world_size()))
    return [label for label in labels if label == "gemm_all_reduce"]


def test_ranks_exchange_once_for_all_numbers_of_rows(ranks: Any) -> None:
    assert ranks(2).run(_asked_in_calls) == [["gemm_all_reduce"] * 2] * 2


def _run_by(names_of: Any) -> list[str]:
    """The implementations that calls of two numbers of rows run, where rank 1 adopts another
    profile between them.
    """
    group, choose, run = interlace.group_of(dist.new_group()), GemmAllReduce.choose, []

    def chosen(*given: Any, **call: Any) -> Any:
        names = names_of(dist.get_rank())
        times_us = dict.fromkeys(names, 1.0)
        return dataclasses.replace(choose(*given, **call), impl=names[0], times_us=times_us)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GemmAllReduce, "choose", chosen)
        patch.setattr(
            dispatch, "_run", lambda each, call, _: run.append(each.name) or call.operands.x
        )
        _call(group, 4)
        if dist.get_rank() == 1:
            known_profiles.adopt(known_profiles.profile_of("NVIDIA H200"))
        _call(group, 6)
    return run


def _run_by_what_was_known() -> list[str]:
    known = known_profiles.version()

    def names_of(rank: int) -> list[str]:
        is_known = known_profiles.version() == known
        return ["pushed", "unfused"] if is_known else ["chunked", "fused"]

    return _run_by(names_of)


def test_ranks_choose_by_what_they_knew_when_they_agreed(ranks: Any) -> None:
    assert ranks(2).run(_run_by_what_was_known) == [["pushed"] * 2] * 2


def _run_by_other_profiles() -> list[str]:
    with mock.patch.object(decision, "profile_digest", return_value=f"{dist.get_rank()}'s"):
        return _run_by(lambda rank: ["chunked", "fused"] if rank else ["pushed", "unfused"])


def test_ranks_with_other_profiles_run_what_rank_0_chooses(ranks: Any) -> None:
    assert ranks(2).run(_run_by_other_profiles) == [["pushed"] * 2] * 2


def _different_rows(impl: str) -> tuple[str, dict[str, Any]]:
    group = interlace.group_of(dist.new_group())
    _call(group, 4, impl)
    group.deadline_s = 3.0
    kind, _, fields = error_of(lambda: _call(group, 6 + dist.get_rank(), impl))
    return kind, fields


@pytest.mark.parametrize("impl", ["fused", "gemv", "unfused"])
def test_different_rows_are_found(ranks: Any, impl: str) -> None:
    """By the marks of signals, and those of a comparison ahead of a pair, which has none."""
    outcomes = ranks(2).run(_different_rows, impl)
    assert {kind for kind, _ in outcomes} == {"PeerTimeoutError"}
    assert any(fields["different_call"] for _, fields in outcomes)


def _different_rows_of_a_pair_that_steps_in() -> tuple[str, dict[str, Any]]:
    """Calls whose first implementation has no output for their rows, so the pair runs them."""
    choose = GemmAllReduce.choose

    def chosen(*given: Any, **call: Any) -> Any:
        times_us = {"chunked": 1.0, "unfused": 2.0}
        return dataclasses.replace(choose(*given, **call), impl="chunked", times_us=times_us)

    with mock.patch.object(GemmAllReduce, "choose", chosen):
        return _different_rows("auto")


def test_different_rows_are_found_where_a_pair_steps_in(ranks: Any) -> None:
    """A pair runs with no marks of its own wherever it stands among the implementations."""
    outcomes = ranks(2).run(_different_rows_of_a_pair_that_steps_in)
    assert {kind for kind, _ in outcomes} == {"PeerTimeoutError"}
    assert any(fields["different_call"] for _, fields in outcomes)


def test_marks_of_sizes() -> None:
    """Powers of two and neighbours, which programs mix up, have different ones."""
    families = [Family(number, is_alike=True, profiles=0) for number in range(60)]
    assert all(0 < family.mark(size) < 1 << 31 for family in families for size in range(300))
    for sizes in ([1 << power for power in range(20)], range(125)):
        assert len({families[3].mark(size) for size in sizes}) == len(sizes)
    assert len({family.mark(64) for family in families}) == len(families)


@pytest.mark.parametrize(
    ("rows", "ranks_count", "expected"),
    [
        (1, 2, 1), (31, 2, 31), (32, 4, 32),  # few rows are chosen for by themselves
        (33, 2, 35), (64, 2, 64), (66, 2, 68), (130, 4, 137), (255, 2, 257), (256, 4, 256),
        (257, 2, 273), (258, 2, 272), (272, 2, 272), (512, 2, 512), (514, 2, 544),
        (1000, 2, 1024), (1000, 3, 1025), (4096, 8, 4096), (4098, 2, 4352), (8191, 2, 8193),
    ],
)  # fmt: skip
def test_classes_of_rows(rows: int, ranks_count: int, expected: int) -> None:
    assert rows_of_class(rows, ranks_count) == expected


def test_many_rows_are_chosen_for_by_their_class() -> None:
    """All of a class alike, but for sizes that were measured."""
    gpu, sizes = gpu_named("h200"), {"columns": 8192, "inner": 4096, "world_size": 2}
    call = sizes | {"device": gpu, "dtype": torch.bfloat16}
    for name in ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_to_all"):
        operator = product_operator(name)
        choices = [operator.choose(rows=rows, **call) for rows in (994, 1000, 1024, 1026)]
        assert choices[0] is choices[1] is choices[2] is not choices[3]
    measured = profile_of(gpu.name).corrections["gemm_all_reduce"].calls
    rows, columns, inner, ranks_count = next(
        call for call in measured if rows_of_class(call[0], call[3]) != call[0]
    )
    call |= {"columns": columns, "inner": inner, "world_size": ranks_count}
    assert by_class("gemm_all_reduce", call | {"rows": rows})["rows"] == rows
    assert by_class("gemm_all_reduce", call | {"rows": rows + ranks_count})["rows"] > rows + 1
    on_cpu = call | {"rows": rows + ranks_count, "device": torch.device("cpu")}
    assert by_class("gemm_all_reduce", on_cpu) == on_cpu
