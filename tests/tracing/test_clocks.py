"""The comparison of two ranks' clocks, by the kernel that GPUs run."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.errors import ArgumentError
from interlace.tracing.clocks import Clock, compare_with_first


def _compare() -> list[Clock]:
    group = group_of()
    return [compare_with_first(group, client) for client in (1, 2, 1)]


def test_ranks_of_one_machine_have_one_clock(ranks: Any) -> None:
    """Here the offset is known to be 0; a comparison may be made again, and with any rank."""
    results = ranks(3).run(_compare)
    assert results[0] == results[1] == results[2]
    for offset_ns, error_ns in results[0]:
        assert 0 < error_ns < 1e9
        assert abs(offset_ns) <= error_ns


def _in_a_group_of_two() -> list[list[str]] | None:
    """Trace a group of some ranks, while it and the group of all ranks make calls."""
    group = dist.new_group([2, 1])
    x, w = torch.ones(8, 16), torch.ones(8, 16)
    interlace.gemv_all_reduce(x[:1], w)
    if dist.get_rank() == 0:
        interlace.gemv_all_reduce(x[:1], w)
        return None
    with interlace.trace(group) as trace:
        interlace.gemm_reduce_scatter(x, w, group=group)
        interlace.gemv_all_reduce(x[:1], w)
    return [[launch.name for launch in of_rank] for of_rank in trace.launches]


def test_a_trace_is_of_one_group(ranks: Any) -> None:
    assert ranks(3).run(_in_a_group_of_two) == [None] + [[["gemm_reduce_scatter"]] * 2] * 2


def _held() -> tuple[float, list[int], list[str]]:
    x, w = torch.ones(1, 16), torch.ones(8, 16)
    start = time.perf_counter()
    with interlace.trace(hold_s=0.2) as trace:
        interlace.gemv_all_reduce(x, w)
    seconds = time.perf_counter() - start
    refusals = []
    for hold_s in (-1.0, cast(float, "1")):
        with pytest.raises(ArgumentError) as refused, interlace.trace(hold_s=hold_s):
            pass
        refusals.append(str(refused.value))
    return seconds, [len(of_rank) for of_rank in trace.launches], refusals


def test_calls_are_held_back_on_every_rank(ranks: Any) -> None:
    """What holds them back is no part of the trace."""
    for seconds, launches, refusals in ranks(2).run(_held):
        assert seconds > 0.2
        assert launches == [1, 1]
        assert all("hold_s must be" in refused for refused in refusals)
