"""A rank that has no memory for the first call of a kind tells the others, which wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.gemm import dispatch
from tests.errors import error_of


def _call(process_group: Any, impl: str, *, rows: int = 8) -> torch.Tensor:
    x, w = torch.full((rows, 16), dist.get_rank() + 1.0), torch.ones(4, 16)
    return interlace.all_gather_gemm(x, w, impl=impl, group=process_group)


def _without_memory(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let rank 1 have no memory for an implementation from now on, before it does anything."""
    run = dispatch._run

    def fail(implementation: Any, call: Any, decision: Any) -> Any:
        if implementation.name == name and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return run(implementation, call, decision)

    patch.setattr(dispatch, "_run", fail)


def _first_calls() -> dict[str, Any]:
    process_group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        _without_memory(patch, "fused")
        refused = [error_of(_call, process_group, "fused")[:2] for _ in range(2)]
        falling_back = [_call(process_group, "auto").sum(1).unique().tolist() for _ in range(2)]
    return {
        "refused": refused,
        "falling back": falling_back,
        "later": _call(process_group, "fused").sum(1).unique().tolist(),
        "broken": group_of(process_group).health.broken,
    }


def test_all_ranks_refuse_or_fall_back(ranks: Any) -> None:
    for found in ranks(2).run(_first_calls):
        for kind, message in found["refused"]:
            assert kind.endswith("GivenUpError")
            assert "rank 1 has not. all_gather_gemm: CUDA out of memory." in message
        assert found["falling back"] == [[64.0, 128.0]] * 2
        assert found["later"] == [64.0, 128.0]
        assert not found["broken"]


def _without_an_exchange() -> tuple[str, int]:
    process_group = dist.new_group()
    interlace.set_deadline(90.0, process_group)
    _call(process_group, "fused", rows=32)  # whose memory is enough for the others
    interlace.set_deadline(4.0, process_group)
    with pytest.MonkeyPatch.context() as patch:
        _without_memory(patch, "fused")
        try:
            _call(process_group, "fused")
        except torch.OutOfMemoryError as error:
            return type(error).__name__, -1
        except interlace.PeerTimeoutError as error:
            return type(error).__name__, error.peer
    raise AssertionError("the call must fail")


def test_the_rank_without_memory_is_named_where_no_rank_asks(ranks: Any) -> None:
    assert ranks(2).run(_without_an_exchange) == [("PeerTimeoutError", 1), ("OutOfMemoryError", -1)]
