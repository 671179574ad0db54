"""Ranks agree once on products of all numbers of rows. Run with ``-m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import process_group_named
from tests.asked import asked
from tests.pool import RankFailure

pytestmark = pytest.mark.gpu

COLUMNS, INNER = 1024, 512


def _new_rows(operator: str) -> tuple[float, int]:
    """The largest relative error of calls of many numbers of rows, and how often ranks agreed."""
    group = interlace.group_of(dist.new_group())
    process_group = process_group_named(group.name)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    w = torch.randn(COLUMNS, INNER, generator=generator, device="cuda").bfloat16()
    function, errors = getattr(interlace, operator), [0.0]
    with asked() as labels:
        for rows in (2, 4, 16, 62, 64, 130, 512, 770, 1024, 2050, 4096):
            rows = 8 * rows  # which divides among the ranks
            x = torch.randn(rows, INNER, generator=generator, device="cuda").bfloat16()
            y = function(x, w, group=process_group)
            expected = function(x, w, group=process_group, impl="unfused").double()
            errors.append(float((y.double() - expected).norm() / expected.norm()))
    interlace.synchronize()
    return max(errors), labels.count(operator)


@pytest.mark.parametrize(
    "operator", ["gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_to_all"]
)
def test_ranks_agree_once(ranks: Any, world_size: int, operator: str) -> None:
    for error, agreements in ranks(world_size).run(_new_rows, operator):
        assert error < 1e-2
        assert agreements == 2, "of auto and of unfused"


def _different_rows(impl: str) -> None:
    group = interlace.group_of(dist.new_group())
    process_group = process_group_named(group.name)
    w = torch.ones(COLUMNS, INNER, device="cuda").bfloat16()
    for rows in (64, 96 + 32 * dist.get_rank()):
        x = torch.ones(rows, INNER, device="cuda").bfloat16()
        interlace.gemm_all_reduce(x, w, group=process_group, impl=impl)
        if rows == 64:
            torch.cuda.synchronize()
            group.deadline_s = 3.0
    interlace.synchronize(process_group)


@pytest.mark.parametrize("impl", ["fused", "nccl"])
def test_different_rows_are_found(ranks: Any, impl: str) -> None:
    """Ahead of a stock pair, too, whose kernels may then wait for ever: the ranks end."""
    with pytest.raises(RankFailure, match="PeerTimeoutError"):
        ranks(2).run(_different_rows, impl)
