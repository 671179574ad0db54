"""The all-to-all of rows, and a batch of products with what comes: what the pass for
``torch.compile`` makes of experts.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.operators  # registers torch.ops.interlace
from tests.errors import error_of


def _name():
    return dist.group.WORLD.group_name


def _operands(count, share, inner, columns, dtype, which=0):
    """x ``[R B C, K]`` and w ``[B, K, N]``, in one of several layouts."""
    generator = torch.Generator().manual_seed(100 * which + dist.get_rank())
    rows = dist.get_world_size() * count * share
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    w = torch.randn(count, inner, columns, generator=generator).to(dtype)
    if which % 3 == 1:  # rows with a gap between them
        x = torch.cat([x, x], 1)[:, :inner]
    if which % 3 == 2:  # rows that are not contiguous
        x = x.T.contiguous().T
    return x, w.mT.contiguous().mT if which % 2 else w


def _wanted(x, count):
    """``[B, R C, K]``: what comes from each rank for each product, by an all-to-all."""
    ranks = dist.get_world_size()
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous())
    return received.view(ranks, count, -1, x.shape[1]).transpose(0, 1).flatten(1, 2)


def _errors(cases, impl):
    """Whether the received rows are those that were sent; the largest error of products in
    roundings of the largest element.
    """
    found = []
    for which, (count, share, inner, columns, dtype) in enumerate(cases):
        x, w = _operands(count, share, inner, columns, dtype, which)
        for scale in (1, -2):  # the second call finds the first one's rows
            y, received = torch.ops.interlace.all_to_all_bmm(x * scale, w, _name(), impl)
            rows = _wanted(x * scale, count)
            wanted = torch.bmm(rows.double(), w.double())
            assert (*y.shape, y.dtype) == (*wanted.shape, dtype)
            assert y.is_contiguous()
            assert received.is_contiguous()
            error = (y.double() - wanted).abs() / (
                torch.finfo(dtype).eps * wanted.abs().max().clamp(min=1)
            )
            found.append((torch.equal(received, rows), float(error.max())))
    return found


@pytest.mark.parametrize("impl", ["chunked", "pushed"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_matches_float64(ranks, world_size, impl):
    """Batches of one and of several, a row for each, K that is no multiple of 16 bytes."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    cases = [
        (2, 16, 32, 32, float32), (3, 5, 7, 33, float32), (1, 17, 40, 20, float32),
        (4, 1, 33, 65, bfloat16), (2, 16, 64, 64, bfloat16), (1, 3, 9, 5, torch.float16),
        (2, 4, 3, 1, float32),
    ]  # fmt: skip
    for found in ranks(world_size).run(_errors, cases, impl):
        assert all(same for same, _ in found)
        assert max(error for _, error in found) < 8, found


def _moved(impl, count, share, inner, columns):
    """Bytes that a call's copies bring from each rank, and that its kernel stores on each."""
    x, w = _operands(count, share, inner, columns, torch.float32)
    traffic = interlace.group_of().traffic
    traffic.reset()
    torch.ops.interlace.all_to_all_bmm(x, w, _name(), impl)
    return dict(traffic.bytes_from), dict(traffic.bytes_to)


def test_only_shares_travel(ranks):
    """Not all that a peer has; of rows of 24 bytes copies take 32, and a kernel adds a word."""
    for rank, moved in enumerate(ranks(3).run(_moved, "chunked", 2, 5, 6, 7)):
        assert moved == ({peer: 2 * 5 * 32 for peer in range(3) if peer != rank}, {})
    for rank, moved in enumerate(ranks(3).run(_moved, "pushed", 2, 5, 6, 7)):
        assert moved == ({}, {peer: 2 * 5 * 24 + 8 for peer in range(3) if peer != rank})


def _error(x, w, impl="auto"):
    return error_of(torch.ops.interlace.all_to_all_bmm, x, w, _name(), impl)


def _refused():
    one = torch.ones
    return [
        _error(one(4, 3), one(2, 3, 5)),
        _error(one(6, 3), one(2, 3, 5)),
        _error(one(4, 3), one(3, 5)),
        _error(one(4, 3), one(2, 4, 5)),
        _error(one(4, 3), one(2, 3, 5, dtype=torch.bfloat16)),
        _error(one(4, 3), one(2, 3, 0)),
        _error(one(4, 3), one(2, 3, 5), "fused"),
    ]


def test_what_does_not_fit_is_refused(ranks):
    for good, *bad in ranks(2).run(_refused):
        assert good is None
        assert [error for error, *_ in bad] == ["ArgumentError"] * len(bad)
        assert "must divide evenly over 2 ranks and 2 products; got 6" in bad[0][1]
        assert all("must be [R B C, K] and w [B, K, N]" in text for _, text, *_ in bad[1:-1])
        assert (
            bad[-1][1]
            == "all_to_all_bmm: impl must be one of auto, batch_invariant, chunked, pushed, "
            "unfused; got 'fused'."
        )


def _disagree():
    return _error(torch.ones(4, 3), torch.ones(1, 3, 5 + dist.get_rank()))


def test_ranks_that_disagree(ranks):
    assert [error for error, *_ in ranks(2).run(_disagree)] == ["RankMismatchError"] * 2


def _absent_peer(impl):
    """Rank 1 makes one call only; what rank 0 sees of the next."""
    x, w = _operands(2, 3, 8, 5, torch.float32)
    group = dist.new_group()
    torch.ops.interlace.all_to_all_bmm(x, w, group.group_name, impl)
    interlace.set_deadline(1.0, group)
    found = (
        None
        if dist.get_rank()
        else error_of(torch.ops.interlace.all_to_all_bmm, x, w, group.group_name, impl)
    )
    dist.barrier()
    return found


@pytest.mark.parametrize("impl", ["chunked", "pushed"])
def test_a_peer_that_never_calls(ranks, impl):
    (kind, message, fields), other = ranks(2).run(_absent_peer, impl)
    assert other is None
    assert (kind, fields["peer"], fields["wanted"]) == ("PeerTimeoutError", 1, 2)
    assert message.startswith("all_to_all_bmm: rank 0 waited 1 s for rank 1 ")


def _check():
    x, w = _operands(2, 4, 5, 6, torch.float32)
    utils = ("test_schema", "test_faketensor")
    return torch.library.opcheck(
        torch.ops.interlace.all_to_all_bmm.default, (x, w, _name(), "auto"), test_utils=utils
    )


def test_opcheck(ranks):
    for outcome in ranks(2).run(_check):
        assert set(outcome.values()) == {"SUCCESS"}, outcome
