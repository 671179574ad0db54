"""The sum of several products: what the pass for ``torch.compile`` makes of a gradient under
sequence parallelism.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from tests.errors import error_of

INNERS = (24, 7, 1)


def _operands(rows, columns, dtype, seed):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x = [torch.randn(rows, inner, generator=generator).to(dtype) for inner in INNERS]
    w = [torch.randn(columns, inner, generator=generator).to(dtype) for inner in INNERS]
    return x, [w[0], w[1].T.contiguous().T, w[2]]


def _errors(cases):
    """Shapes, and the largest error in roundings of the sum's largest element, call after call."""
    found = []
    for seed, (rows, columns, dtype) in enumerate(cases):
        x, w = _operands(rows, columns, dtype, seed)
        y = torch.ops.interlace.gemm_sum_reduce_scatter(x, w, dist.group.WORLD.group_name)
        total = sum(each.double() @ weight.double().T for each, weight in zip(x, w, strict=True))
        dist.all_reduce(total)
        wanted = total.tensor_split(dist.get_world_size())[dist.get_rank()]
        scale = torch.finfo(dtype).eps * total.abs().max().clamp(min=1) if total.numel() else 1
        found.append(
            (
                tuple(y.shape),
                float(((y.double() - wanted).abs() / scale).max()) if y.numel() else 0.0,
            )
        )
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_matches_float64(ranks, world_size):
    """One piece a rank and two; rows that do not divide, fewer than ranks, none."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    cases = [
        (40 * world_size, 33, float32),
        (7, 16, bfloat16),
        (3, 5, float32),
        (0, 5, float32),
        (40 * world_size, 33, bfloat16),
    ]
    for rank, found in enumerate(ranks(world_size).run(_errors, cases)):
        rows = [len(torch.empty(case[0]).tensor_split(world_size)[rank]) for case in cases]
        assert [shape for shape, _ in found] == [
            (each, case[1]) for each, case in zip(rows, cases, strict=True)
        ]
        assert max(error for _, error in found) < 8


def _disagree():
    x, w = _operands(4, 3 + dist.get_rank(), torch.float32, 0)
    return error_of(torch.ops.interlace.gemm_sum_reduce_scatter, x, w, dist.group.WORLD.group_name)[
        0
    ]


def test_ranks_that_disagree(ranks):
    assert ranks(2).run(_disagree) == ["RankMismatchError"] * 2


def _check():
    x, w = _operands(5, 6, torch.float32, 0)
    utils = ("test_schema", "test_faketensor")
    return torch.library.opcheck(
        torch.ops.interlace.gemm_sum_reduce_scatter.default,
        (x, w, dist.group.WORLD.group_name),
        test_utils=utils,
    )


def test_opcheck(ranks):
    for outcome in ranks(2).run(_check):
        assert set(outcome.values()) == {"SUCCESS"}, outcome
