"""A batch of products, each rank's share of each product's rows to it: what the pass for
``torch.compile`` makes of experts.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from tests.errors import error_of


def _operands(count, rows, inner, columns, dtype, along_k):
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    x = torch.randn(count, rows, inner, generator=generator).to(dtype)
    w = torch.randn(count, inner, columns, generator=generator).to(dtype)
    return x, w.mT.contiguous().mT if along_k else w


def _errors(cases, impl):
    """The largest error in roundings of the result's largest element, call after call; weights and
    rows in several layouts.
    """
    found = []
    for which, (count, rows, inner, columns, dtype) in enumerate(cases):
        ranks = dist.get_world_size()
        x, w = _operands(count, rows * ranks, inner, columns, dtype, along_k=bool(which % 2))
        if which % 3 == 2:  # rows that do not lie one behind the other
            x = torch.cat([x, x], 1)[:, : rows * ranks]
        y = torch.ops.interlace.bmm_all_to_all(x, w, dist.group.WORLD.group_name, impl)
        sent = (
            torch.bmm(x.double(), w.double())
            .unflatten(1, (ranks, rows))
            .transpose(0, 1)
            .contiguous()
        )
        wanted = torch.empty_like(sent)
        dist.all_to_all_single(wanted, sent)
        assert (*y.shape, y.dtype) == (count * ranks * rows, columns, dtype)
        scale = torch.finfo(dtype).eps * wanted.abs().max().clamp(min=1) if wanted.numel() else 1
        error = ((y.double().view(wanted.shape) - wanted).abs() / scale).max() if y.numel() else 0.0
        found.append(float(error))
    return found


@pytest.mark.parametrize(
    ("world_size", "impl"), [(1, "auto"), (2, "auto"), (3, "fused"), (1, "chunked"), (3, "chunked")]
)
def test_matches_float64(ranks, world_size, impl):
    """Whole tiles and not, products of one row a rank, weights that do not fill tiles, a batch of
    one, of none.
    """
    float32, bfloat16 = torch.float32, torch.bfloat16
    cases = [
        (2, 16, 32, 32, float32), (3, 5, 7, 33, float32), (2, 17, 40, 20, float32),
        (4, 1, 33, 65, bfloat16), (1, 6, 8, 9, float32), (2, 16, 64, 64, bfloat16),
        (0, 4, 4, 4, float32), (2, 0, 4, 4, float32), (2, 4, 3, 0, float32),
    ]  # fmt: skip
    for found in ranks(world_size).run(_errors, cases, impl):
        assert max(found) < 8, found


def _sum_errors(cases):
    """As above, of sums of batches, each of another K and layout."""
    found = []
    for count, rows, inners, columns, dtype in cases:
        ranks = dist.get_world_size()
        pairs = [
            _operands(count, rows * ranks, k, columns, dtype, along_k=bool(k % 2)) for k in inners
        ]
        x, w = ([pair[i] for pair in pairs] for i in range(2))
        y = torch.ops.interlace.bmm_sum_all_to_all(x, w, dist.group.WORLD.group_name)
        total = sum(torch.bmm(one.double(), other.double()) for one, other in pairs)
        sent = total.unflatten(1, (ranks, rows)).transpose(0, 1).contiguous()
        wanted = torch.empty_like(sent)
        dist.all_to_all_single(wanted, sent)
        assert (*y.shape, y.dtype) == (count * ranks * rows, columns, dtype)
        scale = torch.finfo(dtype).eps * wanted.abs().max().clamp(min=1)
        found.append(float(((y.double().view(wanted.shape) - wanted).abs() / scale).max()))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_match_float64(ranks, world_size):
    """Where more sizes come than outputs are kept, the last are summed and exchanged by torch."""
    cases = [
        (2, 4, (8, 3), 5, torch.float32),
        (1, 6, (7, 4, 2), 33, torch.float32),
        (3, 1, (16, 16), 8, torch.bfloat16),
    ]
    cases += [(2, rows, (3, 4), 6, torch.float32) for rows in range(5, 12)]
    for found in ranks(world_size).run(_sum_errors, cases):
        assert max(found) < 8, found


def _refusal(rows, columns, impl="auto"):
    """Of a call of two products, where ``columns`` says how many this rank has."""
    x, w = torch.ones(2, rows, 4), torch.ones(2, 4, columns[dist.get_rank()])
    return error_of(torch.ops.interlace.bmm_all_to_all, x, w, dist.group.WORLD.group_name, impl)


def test_ranks_that_disagree(ranks):
    assert [error for error, *_ in ranks(2).run(_refusal, 4, (4, 5))] == ["RankMismatchError"] * 2


def test_rows_must_divide(ranks):
    for error, text, _ in ranks(2).run(_refusal, 3, (5, 5)):
        assert (error, "must divide evenly over 2 ranks" in text) == ("ArgumentError", True)


def test_an_implementation_that_there_is_not(ranks):
    for error, text, _ in ranks(2).run(_refusal, 4, (5, 5), "quick"):
        assert error == "ArgumentError"
        assert (
            "impl must be one of auto, batch_invariant, fused, chunked, unfused; got 'quick'"
            in text
        )


def _check():
    x, w = _operands(2, 4, 5, 6, torch.float32, along_k=False)
    utils = ("test_schema", "test_faketensor")
    calls = {"bmm_all_to_all": (x, w, dist.group.WORLD.group_name, "auto")}
    calls["bmm_sum_all_to_all"] = [x, x], [w, w], dist.group.WORLD.group_name
    return [
        torch.library.opcheck(
            getattr(torch.ops.interlace, name).default, calls[name], test_utils=utils
        )
        for name in calls
    ]


def test_opcheck(ranks):
    for outcomes in ranks(2).run(_check):
        assert all(set(outcome.values()) == {"SUCCESS"} for outcome in outcomes), outcomes
