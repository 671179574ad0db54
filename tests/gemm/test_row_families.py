"""Ranks agree once on calls that differ in their rows alone, and still find different rows."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import process_group_named
from interlace.comm.groups.group import Group
from interlace.comm.host.agreement import Agreement, Family
from interlace.costs import known_profiles
from interlace.gemm import dispatch
from interlace.operators.gemm_all_reduce import GemmAllReduce
from tests.errors import error_of


def _call(group: Group, rows: int, impl: str = "auto") -> torch.Tensor:
    process_group = process_group_named(group.name)
    return interlace.gemm_all_reduce(
        torch.ones(rows, 8), torch.ones(8, 8), group=process_group, impl=impl
    )


def _asked_in_calls() -> list[str]:
    """The exchanges of calls of many numbers of rows, by implementations with and without marks."""
    group = interlace.group_of(dist.new_group())
    ask, labels = Agreement._ask, []

    def recorded(self: Agreement, label: str, value: object) -> list[Any]:
        labels.append(label)
        return ask(self, label, value)

    with mock.patch.object(Agreement, "_ask", recorded):
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
    with mock.patch.object(dispatch, "profile_digest", return_value=f"{dist.get_rank()}'s"):
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


def test_marks_of_sizes() -> None:
    """Powers of two and neighbours, which programs mix up, have different ones."""
    families = [Family(number, is_alike=True, profiles=0) for number in range(60)]
    assert all(0 < family.mark(size) < 1 << 31 for family in families for size in range(300))
    for sizes in ([1 << power for power in range(20)], range(125)):
        assert len({families[3].mark(size) for size in sizes}) == len(sizes)
    assert len({family.mark(64) for family in families}) == len(families)
