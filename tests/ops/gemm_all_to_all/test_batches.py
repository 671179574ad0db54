"""A batch of products, each rank's share of each product's rows to it: what the pass for ``torch.compile`` makes of experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import interlace.ops  # noqa: F401  # registers torch.ops.interlace
from tests.errors import error_of


def _operands(count, rows, inner, columns, dtype, along_k):
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    x = torch.randn(count, rows, inner, generator=generator).to(dtype)
    w = torch.randn(count, inner, columns, generator=generator).to(dtype)
    return x, w.mT.contiguous().mT if along_k else w


def _errors(cases, impl):
    """The largest error in roundings of the result's largest element, call after call; weights and rows in several layouts."""
    found = []
    for which, (count, rows, inner, columns, dtype) in enumerate(cases):
        ranks = dist.get_world_size()
        x, w = _operands(count, rows * ranks, inner, columns, dtype, along_k=bool(which % 2))
        if which % 3 == 2:  # rows that do not lie one behind the other
            x = torch.cat([x, x], 1)[:, : rows * ranks]
        y = torch.ops.interlace.bmm_all_to_all(x, w, dist.group.WORLD.group_name, impl)
        sent = torch.bmm(x.double(), w.double()).unflatten(1, (ranks, rows)).transpose(0, 1).contiguous()
        wanted = torch.empty_like(sent)
        dist.all_to_all_single(wanted, sent)
        assert (*y.shape, y.dtype) == (count * ranks * rows, columns, dtype)
        scale = torch.finfo(dtype).eps * wanted.abs().max().clamp(min=1) if wanted.numel() else 1
        error = ((y.double().view(wanted.shape) - wanted).abs() / scale).max() if y.numel() else 0.0
        found.append(float(error))
    return found


@pytest.mark.parametrize(("world_size", "impl"), [(1, "auto"), (2, "auto"), (3, "fused"), (1, "split"), (3, "split")])
def test_matches_float64(ranks, world_size, impl):
    """Whole tiles and not, products of one row a rank, weights that do not fill tiles, a batch of one, of none."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    cases = [
        (2, 16, 32, 32, float32), (3, 5, 7, 33, float32), (2, 17, 40, 20, float32), (4, 1, 33, 65, bfloat16), (1, 6, 8, 9, float32),
        (2, 16, 64, 64, bfloat16), (0, 4, 4, 4, float32), (2, 0, 4, 4, float32), (2, 4, 3, 0, float32),
    ]  # fmt: skip
    for found in ranks(world_size).run(_errors, cases, impl):
        assert max(found) < 8, found


def _disagree(rows, columns):
    x, w = torch.ones(2, rows, 4), torch.ones(2, 4, columns + dist.get_rank())
    return error_of(torch.ops.interlace.bmm_all_to_all, x, w, dist.group.WORLD.group_name, "auto")


def test_ranks_that_disagree(ranks):
    assert [error for error, *_ in ranks(2).run(_disagree, 4, 4)] == ["RankMismatchError"] * 2


def _uneven():
    return error_of(
        torch.ops.interlace.bmm_all_to_all, torch.ones(2, 3, 4), torch.ones(2, 4, 5), dist.group.WORLD.group_name, "auto"
    )


def test_rows_must_divide(ranks):
    for error, text, _ in ranks(2).run(_uneven):
        assert (error, "must divide evenly over 2 ranks" in text) == ("ArgumentError", True)


def _unknown():
    return error_of(
        torch.ops.interlace.bmm_all_to_all, torch.ones(2, 4, 4), torch.ones(2, 4, 5), dist.group.WORLD.group_name, "quick"
    )


def test_an_implementation_that_there_is_not(ranks):
    for error, text, _ in ranks(2).run(_unknown):
        assert (error, "impl must be one of auto, fused, split; got 'quick'" in text) == ("ArgumentError", True)


def _check():
    x, w = _operands(2, 4, 5, 6, torch.float32, along_k=False)
    utils = ("test_schema", "test_faketensor")
    return torch.library.opcheck(
        torch.ops.interlace.bmm_all_to_all.default, (x, w, dist.group.WORLD.group_name, "auto"), test_utils=utils
    )


def test_opcheck(ranks):
    for outcome in ranks(2).run(_check):
        assert set(outcome.values()) == {"SUCCESS"}, outcome
