"""What stays of a group that is gone: nothing, not even addresses, unless a tensor still needs
it.
"""

from __future__ import annotations

import errno
import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import interlace

_GIB = 2**30


def _mapped_bytes() -> int:
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:interlace" in line:
            first, last = line.split()[0].split("-")
            total += int(last, 16) - int(first, 16)
    return total


def _address_space_gib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmSize")).split()[1]) * 1024 // _GIB


def _groups_come_and_go(release: bool, impl: str) -> tuple[int, int, list[bool]]:
    """Of four groups, each with an operator's memory: what is mapped, reserved and alive after
    them.
    """
    interlace.group_of()
    gc.collect()
    mapped, reserved = _mapped_bytes(), _address_space_gib()
    alive = []
    for _ in range(4):
        process_group = dist.new_group()
        group = weakref.ref(interlace.group_of(process_group))
        x = torch.randn(64, 16)
        interlace.gemm_all_reduce(x, torch.randn(64, 16), group=process_group, impl=impl)
        if release:
            group().release()
        dist.barrier()
        dist.destroy_process_group(process_group)
        del process_group
        gc.collect()
        alive.append(group() is not None)
    return _mapped_bytes() - mapped, _address_space_gib() - reserved, alive


@pytest.mark.parametrize("impl", ["fused", "remote_stores"])
@pytest.mark.parametrize("release", [False, True])
def test_a_group_that_is_gone_leaves_nothing(ranks, release, impl):
    """A group reserves 128 GiB of addresses for two ranks; 2 GiB allow for what else the process
    does meanwhile.
    """
    for mapped, reserved, alive in ranks(2).run(_groups_come_and_go, release, impl):
        assert alive == [False] * 4
        assert mapped == 0
        assert reserved < 2


def _tensor_without_group() -> tuple[bool, float, int, int, int]:
    """A symmetric tensor, and an operator's result, whose group is gone; then they go, too."""
    rank = dist.get_rank()
    interlace.group_of()
    gc.collect()
    before, reserved = _mapped_bytes(), _address_space_gib()
    process_group = dist.new_group()
    group = weakref.ref(interlace.group_of(process_group))
    peers = interlace.empty_symmetric((1000,), dtype=torch.float32, group=process_group).peers
    dist.barrier()
    dist.destroy_process_group(process_group)
    del process_group
    gc.collect()
    gone, mapped = group() is None, _mapped_bytes() - before
    held = _address_space_gib() - reserved
    peers[1 - rank].fill_(rank + 1.0)
    dist.barrier()
    total = peers[rank].sum().item()
    dist.barrier()
    del peers
    gc.collect()
    return gone, total, mapped, held, _mapped_bytes() - before


def test_a_tensor_outlives_its_group(ranks):
    for rank, (gone, total, mapped, held, left) in enumerate(ranks(2).run(_tensor_without_group)):
        assert gone
        assert total == 1000.0 * (2 - rank)
        assert mapped == 2 * 4096
        assert held >= 127
        assert left == 0


def _output_without_group() -> tuple[bool, bool]:
    """The result of an operator whose peers write into it, of a group that is gone."""
    process_group = dist.new_group()
    group = weakref.ref(interlace.group_of(process_group))
    x, w = torch.ones(64, 16), torch.ones(32, 16)
    y = interlace.gemm_all_to_all(x, w, group=process_group, impl="fused")
    dist.barrier()
    dist.destroy_process_group(process_group)
    del process_group
    gc.collect()
    return group() is None, bool((y == 16).all())


def test_a_result_outlives_its_group(ranks):
    assert ranks(2).run(_output_without_group) == [(True, True)] * 2


def _rank_without_memory() -> tuple[str, str, bool, float]:
    """Rank 1 cannot make a file; all ranks learn of it at once, and the group goes on."""
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    create = os.memfd_create
    if group.rank == 1:

        def fail(_: str) -> int:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        os.memfd_create = fail
    try:
        interlace.empty_symmetric((8,), dtype=torch.float32, group=process_group)
        outcome = "", ""
    except interlace.InterlaceError as error:
        outcome = type(error).__name__, str(error)
    finally:
        os.memfd_create = create
    sym = interlace.empty_symmetric((8,), dtype=torch.float32, group=process_group)
    dist.barrier()
    sym.peers[1 - group.rank].fill_(1.0)
    dist.barrier()
    return *outcome, group.broken, sym.local.sum().item()


def test_a_rank_without_memory_tells_the_others(ranks):
    first, second = ranks(2).run(_rank_without_memory)
    reason = "shared memory of 4.1 KB must be available; got Cannot allocate memory."
    message = f"empty_symmetric: every rank must have the memory; rank 1 does not. {reason}"
    assert first == ("WorkspaceError", message, False, 8.0)
    assert second == ("WorkspaceError", reason, False, 8.0)
