"""``interlace.recover``: a group that is broken computes again, and right."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm.runtime.interpreter import require
from tests.errors import error_of


class _Program:
    """Every kind of operator on one process group, its inputs, and the outputs that it keeps from
    call to call.
    """

    def __init__(self) -> None:
        require("cpu")
        import interlace.operators  # registers torch.ops.interlace

        self.process_group = dist.new_group()
        self.group = interlace.group_of(self.process_group)
        self.rank, ranks = self.group.rank, self.group.world_size
        interlace.set_deadline(90.0, self.process_group)
        generator = torch.Generator().manual_seed(self.rank)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-4, 5, shape, generator=generator).float()

        self.x, self.w = integers(8 * ranks, 16), integers(32, 16)
        self.table, self.lookups = (
            integers(8, 16),
            torch.randint(0, 8, (4 * ranks,), generator=generator),
        )
        experts = torch.randint(0, ranks, (6, 1), generator=generator)
        self.layer = experts, torch.ones(6, 1), integers(1, 16, 2, 16), integers(1, 16, 16)
        shape = {"dtype": torch.float32, "group": self.process_group}
        self.mapped = interlace.MappedOutput((8 * ranks, 1024), **shape)
        self.counted = interlace.TriggeredTransfers((8 * ranks, 1024), tiles=1, **shape)
        self.fused = interlace.fuse(torch.mm, "all_reduce", shape=(8 * ranks, 32), **shape)

    def results(self) -> list[torch.Tensor]:
        """Of one call each; the same in every round."""
        found, group = [], {"group": self.process_group}
        for impl in ("fused", "chunked"):
            for call in (interlace.gemm_reduce_scatter, interlace.gemm_all_to_all):
                found.append(call(self.x, self.w, impl=impl, **group))
        for impl in ("fused", "remote_stores"):
            found.append(interlace.gemm_all_reduce(self.x, self.w, impl=impl, **group))
        for impl in ("fused", "chunked", "pushed"):
            found.append(interlace.all_gather_gemm(self.x, self.w, impl=impl, **group))
        found.append(interlace.gemv_all_reduce(self.x[:2], self.w, impl="gemv", **group))
        table = self.table.clone().requires_grad_()
        offsets = torch.arange(len(self.lookups) + 1)
        pooled = interlace.embedding_all_to_all([table], self.lookups, offsets, **group)
        pooled.sum().backward()
        found += [pooled.detach(), table.grad]
        found.append(interlace.mixture_of_experts(self.x[:6], *self.layer, **group))
        for output in (self.mapped, self.counted):
            output.begin().fill_(self.rank + 1.0)
            if output is self.counted:
                self.counted.counters.add_(1)
            found.append(output.exchange().clone())
        found.append(self.fused(self.x, self.w.T).clone())
        return found

    # What breaks the group; every rank may fail, and rank 0 does.

    def late(self) -> None:
        """The last rank comes when the others have given up, and may not even notice."""
        if self.rank == self.group.world_size - 1:
            dist.barrier()
            interlace.gemm_reduce_scatter(self.x, self.w, group=self.process_group, impl="fused")
        else:
            try:
                interlace.gemm_reduce_scatter(
                    self.x, self.w, group=self.process_group, impl="fused"
                )
            finally:
                dist.barrier()

    def different(self) -> None:
        call = interlace.gemm_all_to_all if self.rank == 0 else interlace.gemm_reduce_scatter
        call(self.x, self.w, group=self.process_group, impl="fused")

    def absent(self) -> None:
        """From an exchange on the host, in the middle of making an output."""
        if self.rank == 0:
            interlace.gemm_all_reduce(
                self.x[:, :8], self.w[:, :8], group=self.process_group, impl="remote_stores"
            )

    def alone(self) -> None:
        """One rank ends an epoch whose sums take turns in the ranks' memory, and has captured an
        output.
        """
        if self.rank == 0:
            self.mapped.captured = True
            self.fused(self.x, self.w.T)

    def halfway(self) -> None:
        """Epochs of outputs have begun everywhere, and end on one rank only."""
        for output in (self.mapped, self.counted):
            output.begin().fill_(-1.0)
        if self.rank == 0:
            self.mapped.exchange()


def _break_and_recover(ways: list[str]) -> list[tuple[bool, bool, bool, list[int]]]:
    program = _Program()
    kept = program.results()
    expected = [each.clone() for each in kept]
    found = []
    for way in ways:
        interlace.set_deadline(0.5, program.process_group)
        failure = error_of(getattr(program, way))
        broken = program.group.broken
        interlace.set_deadline(90.0, program.process_group)
        interlace.recover(program.process_group)
        alive = all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
        again = program.results()
        wrong = [
            i for i, pair in enumerate(zip(again, expected, strict=True)) if not torch.equal(*pair)
        ]
        found.append(
            (failure is not None or program.rank > 0, broken or program.rank > 0, alive, wrong)
        )
        program.group.check()
    return found


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [(2, ["late", "different", "halfway", "absent", "alone"]), (3, ["late"])],
)
def test_every_operator_is_right_afterwards(ranks, world_size, ways):
    """Whatever broke the group, also several times; results from before stay as they were."""
    outcomes = ranks(world_size).run(_break_and_recover, ways)
    for rank, outcome in enumerate(outcomes):
        for way, found in zip(ways, outcome, strict=True):
            assert (rank, way, *found) == (rank, way, True, True, True, [])


def _recover_without(missing: int) -> tuple[Any, float, bool]:
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    start, error = time.monotonic(), None
    if group.rank != missing:
        error = error_of(interlace.recover, process_group, 3.0)
    seconds = time.monotonic() - start
    dist.barrier()
    interlace.recover(process_group)
    y = interlace.gemv_all_reduce(torch.ones(1, 4), torch.ones(3, 4), group=process_group)
    return (
        error and (error[0], error[2]["operator"], error[2]["peer"]),
        seconds,
        bool((y == 4 * group.world_size).all()),
    )


@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.quick), 2])
def test_a_rank_that_does_not_come_is_named_by_all(ranks, missing):
    """As a dead one would be. Once it comes, too, the group recovers."""
    for rank, (error, seconds, right) in enumerate(ranks(3).run(_recover_without, missing)):
        assert error == (None if rank == missing else ("PeerTimeoutError", "recover", missing))
        assert seconds < 60
        assert right


def test_a_process_on_its_own_recovers():
    assert interlace.recover() is None


@pytest.mark.parametrize("timeout_s", [0, float("nan"), float("inf"), "9"])
def test_a_time_that_never_or_always_ends_is_refused(timeout_s):
    """With NaN, ranks would have waited for one another for ever."""
    with pytest.raises(interlace.ArgumentError, match=r"^recover: timeout_s must be above 0 and "):
        interlace.recover(timeout_s=timeout_s)
