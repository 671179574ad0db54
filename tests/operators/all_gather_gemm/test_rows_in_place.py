"""Rows that lie in a symmetric tensor are fetched where they are; nothing is staged."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import Faults
from interlace.comm import group_of
from interlace.gemm.kernels import layout
from tests.errors import error_of
from tests.gemm.calls import Call, check_all, check_gradients, differentiate

ROWS, COLUMNS, INNER = 24, 20, 40
IMPLS = ["fused", "chunked", "pushed", "unfused"]
IN_PLACE = ["fused", "chunked"]


def _in_place(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """A copy of x in a symmetric tensor, behind some bytes that are not its own."""
    rows = interlace.empty_symmetric((2 + ROWS, x.shape[1]), dtype=x.dtype, group=group)
    return rows.local[2 : 2 + len(x)].copy_(x)


def _call(impl: str, **more: Any) -> Call:
    return Call("all_gather_gemm", ROWS, COLUMNS, INNER, impl=impl, **more)


def _results(calls: list[Call]) -> tuple[list[torch.Tensor], list[bool]]:
    """Results of calls with rows in place, and whether memory for staged rows stayed zero."""
    group = group_of()
    group.release()
    results, is_untouched = [], []
    for call in calls:
        placed = call.placed()
        results.append(call.make(**(placed | {"x": _in_place(placed["x"])})).cpu())
        workspace = group.memory.workspaces.get("all_gather_gemm")
        if workspace is not None:
            dist.barrier()
            staged = torch.frombuffer(_bytes(group, workspace), dtype=torch.uint8)
            is_untouched.append(not staged.any())
    return results, is_untouched


def _bytes(group: Any, workspace: Any) -> Any:
    import ctypes

    data = workspace.data
    kind = ctypes.c_uint8 * data.nbytes
    return kind.from_address(data.address + group.rank * data.stride)


@pytest.mark.parametrize(("impl", "world_size"), [*((impl, 3) for impl in IMPLS), ("chunked", 2)])
def test_results(ranks: Any, impl: str, world_size: int) -> None:
    """Of rows of every dtype, with and without lists of rows."""
    splits = [ROWS, 7, 1][:world_size]
    calls = [
        _call(impl, bias=True),
        _call(impl, dtype="bfloat16"),
        _call(impl, splits=splits, dtype="float16"),
    ]
    outcomes = ranks(world_size).run(_results, calls)
    check_all(calls, [results for results, _ in outcomes])
    if impl in IN_PLACE:
        assert all(all(is_untouched) and len(is_untouched) == 3 for _, is_untouched in outcomes)


def _places() -> list[Any]:
    """Which rows are read in place."""
    from interlace.operators.all_gather_gemm import OPERATOR

    group, f32 = group_of(), torch.float32
    x = interlace.empty_symmetric((8, 8), dtype=f32).local
    odd = interlace.empty_symmetric((8, 7), dtype=f32).local
    tensors = [x, x[2:], x[:, :4], x.T, x[:0], torch.ones(8, 8), odd, x.view(-1)[1:33].view(8, 4)]
    first = group.memory.place_of(x)
    assert first is not None
    places = [OPERATOR.place_of(each, group) for each in tensors]
    return [place and (place.tensor - first.tensor, place.offset) for place in places]


def test_which_rows_are_read_in_place(ranks: Any) -> None:
    """Rows that are contiguous and aligned, of tensors that still are."""
    assert ranks(2).run(_places) == [[(0, 0), (0, 64), *[None] * 6]] * 2
    assert ranks(1).run(_places) == [[None] * 8]


def _overwritten(impl: str, gather: bool) -> list[bool]:
    """Calls one after another, whose rows this rank overwrites as soon as a call is over, where
    peers are late with fetching them.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = interlace.empty_symmetric((ROWS, INNER), dtype=torch.float32)
    other = torch.empty(ROWS, INNER)
    w, right = torch.eye(INNER), []
    config = interlace.AllGatherGemmConfig(block_m=16, block_n=32, block_k=32, max_programs=2)
    with interlace.inject(Faults(seed=rank, max_delay_s=0.005 * (rank + 1))):
        for turn in range(6):
            # Rows in place and others in turn: both kinds of calls use the same signals.
            x = other if turn == 3 else rows.local
            x.fill_(10 * turn + rank)
            y, gathered = interlace.all_gather_gemm(
                x, w, impl=impl, config=config, return_gathered=True
            )
            expected = torch.cat([torch.full_like(x, 10 * turn + r) for r in range(ranks)])
            x.fill_(-1)
            right.append(torch.equal(y, expected) and torch.equal(gathered, expected))
    return right


@pytest.mark.parametrize("impl", IN_PLACE)
def test_rows_may_be_overwritten_when_a_call_is_over(ranks: Any, impl: str) -> None:
    assert ranks(3).run(_overwritten, impl, True) == [[True] * 6] * 3


def _differentiate(call: Call) -> dict[str, torch.Tensor]:
    placed = call.placed

    def in_place(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        tensors = placed(group)
        return tensors | {"x": _in_place(tensors["x"], group)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "placed", lambda self, group=None: in_place(group))
        return differentiate(call)


@pytest.mark.parametrize("impl", ["auto", *IN_PLACE])
def test_gradients(ranks: Any, impl: str) -> None:
    call = _call(impl, bias=True)
    check_gradients(call, ranks(2).run(_differentiate, call))


def _mismatch(impl: str) -> tuple[Any, Any]:
    """A rank that has its rows elsewhere: in a new call, and where both kinds are known."""
    process_group = dist.new_group()
    rank, w = dist.get_rank(), torch.eye(INNER)
    rows = interlace.empty_symmetric((ROWS, INNER), dtype=torch.float32, group=process_group)
    ordinary = torch.ones(ROWS, INNER)
    call = functools.partial(interlace.all_gather_gemm, w=w, impl=impl, group=process_group)
    first = error_of(lambda: call(ordinary if rank else rows.local))
    call(ordinary), call(rows.local)
    interlace.set_deadline(1.0, process_group)
    second = error_of(lambda: call(ordinary if rank else rows.local))
    dist.barrier()
    return first, second


@pytest.mark.parametrize("impl", IN_PLACE)
def test_ranks_whose_rows_lie_elsewhere(ranks: Any, impl: str) -> None:
    for first, second in ranks(2).run(_mismatch, impl):
        assert first[0] == "RankMismatchError"
        assert "the place of x must be the same on every rank; got" in first[1]
        assert "ordinary memory" in first[1]
        assert "symmetric tensor 0, byte 0" in first[1]
        assert second[0] == "PeerTimeoutError"
        assert second[2]["different_call"]


def _gone() -> list[bool]:
    """A tensor that takes the address of one that is gone has another place."""
    group, f32 = group_of(), torch.float32
    places, addresses = [], []
    for _ in range(2):
        rows = interlace.empty_symmetric((8, 8), dtype=f32)
        places.append(group.memory.place_of(rows.local))
        addresses.append(rows.local.data_ptr())
        dist.barrier()
        del rows
    return [addresses[0] == addresses[1], places[0] != places[1]]


def test_a_tensor_at_the_address_of_another_is_another(ranks: Any) -> None:
    assert all(is_another for _, is_another in ranks(2).run(_gone))


def test_signals_that_copies_set_are_those_that_kernels_await() -> None:
    """One set of DONE suffices, so that the host knows its address."""
    assert layout.DONE + layout.MAX_RANKS <= layout.GRANTS
