"""What the heap of a GPU asks of the driver, which is made up here: everything that is mapped is
unmapped, once.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace import BackendError, WorkspaceError
from interlace.comm.groups import memory_cuda
from interlace.comm.groups.memory_cuda import CudaHeap
from interlace.comm.replay.memory import Block, releases

MIB = 2**20
_PEERS = 10**6  # descriptors of the other rank begin here


class _Driver:
    """Reservations, mappings and memory, by address and handle; calls fail as in CUDA where they do
    not fit.
    """

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.references: dict[int, int] = {}
        self.room, self.refused = 100, ""

    def _refuse(self, call: str) -> tuple[Any, ...]:
        return (type("Code", (), {"__int__": lambda _: 1, "name": f"{call} refused"})(),)

    def cuMemAddressReserve(self, size: int, *_: Any) -> tuple[int, int]:
        address = 2**40 + sum(self.reserved.values()) + 2**50 * len(self.reserved)
        self.reserved[address] = size
        return 0, address

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:
        assert self.reserved.pop(address) == size
        assert not [place for place in self.mapped if address <= place < address + size]
        return (0,)

    def cuMemCreate(self, size: int, *_: Any) -> tuple[int, ...]:
        own = {handle for handle, count in self.references.items() if count} | set(
            self.mapped.values()
        )
        if len([handle for handle in own if handle < _PEERS]) >= self.room:
            return (2,)
        handle = 1000 + len(self.references)
        self.references[handle] = 1
        return 0, handle

    def cuMemRelease(self, handle: int) -> tuple[int]:
        self.references[handle] -= 1
        return (0,)

    def cuMemExportToShareableHandle(self, handle: int, *_: Any) -> tuple[int, int]:
        return 0, handle

    def cuMemImportFromShareableHandle(self, descriptor: int, *_: Any) -> tuple[int, int]:
        self.references[descriptor] = self.references.get(descriptor, 0) + 1
        return 0, descriptor

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[int, int]:
        self.references[self.mapped[address]] += 1
        return 0, self.mapped[address]

    def cuMemMap(self, address: int, size: int, _: int, handle: int, *__: Any) -> tuple[Any, ...]:
        if self.refused == "cuMemMap" and len(self.mapped) == 2:
            return self._refuse("cuMemMap")
        assert address not in self.mapped
        self.mapped[address] = handle
        return (0,)

    def cuMemUnmap(self, address: int, _: int) -> tuple[int]:
        del self.mapped[address]
        return (0,)

    def cuMemSetAccess(self, *_: Any) -> tuple[Any, ...]:
        return self._refuse("cuMemSetAccess") if self.refused == "cuMemSetAccess" else (0,)

    def cuMemsetD8(self, *_: Any) -> tuple[int]:
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    @contextlib.contextmanager
    def exchanged(
        _: Any, __: str, fds: list[int], failure: Exception | None
    ) -> Iterator[list[list[int]]]:
        if failure is not None:
            raise failure
        yield [fds, [fd + _PEERS for fd in fds]]

    monkeypatch.setattr(memory_cuda, "exchanged_descriptors", exchanged)
    monkeypatch.setattr(
        CudaHeap,
        "_allow",
        lambda self, address, size: memory_cuda.values_of(self._cu.cuMemSetAccess()),
    )
    return _Driver()


def _heap(driver: _Driver) -> CudaHeap:
    """Of rank 0 of two, with the attributes that the constructor gets from the driver."""
    heap = object.__new__(CudaHeap)
    heap.device, heap.granularity, heap.stride = torch.device("cuda", 0), 2 * MIB, 2**37
    channel = SimpleNamespace(members=SimpleNamespace(world_size=2, rank=0, local_ranks=(0, 1)))
    heap._channel, heap._cu = channel, driver  # type: ignore[assignment]
    heap._properties = heap._handle_type = None
    heap._reserve()
    return heap


def test_a_heap_and_its_blocks_leave_nothing(driver: _Driver) -> None:
    heap = _heap(driver)
    blocks = [heap.allocate(3 * MIB), heap.allocate(MIB, 3)]
    address, release = heap.remap([blocks[1].address, blocks[1].address + heap.stride], 2 * MIB)
    again = Block(address, 4 * MIB, 0, 1, heap.device, release)
    assert blocks[1].address - blocks[0].address == 4 * MIB
    assert len(driver.mapped) == 2 * (1 + 3) + 2
    assert not any(driver.references.values()), "mappings keep the memory"
    del heap
    gc.collect()
    assert len(driver.reserved) == 2, "blocks keep the range"
    blocks.clear()
    assert len(driver.mapped) == 2
    del again, release
    assert driver.mapped == driver.reserved == {}
    assert not releases


@pytest.mark.parametrize("refused", ["cuMemMap", "cuMemSetAccess"])
def test_a_block_that_cannot_be_mapped_leaves_nothing(driver: _Driver, refused: str) -> None:
    heap = _heap(driver)
    driver.refused = refused
    with pytest.raises(BackendError, match=f"{refused} refused"):
        heap.allocate(MIB, 3)
    assert driver.mapped == {}
    assert not any(driver.references.values())
    driver.refused = ""
    assert heap.allocate(MIB).address == next(iter(driver.reserved)), "the addresses are free again"


def test_memory_that_nobody_uses_any_more_makes_room(driver: _Driver) -> None:
    heap = _heap(driver)
    driver.room = 1
    block = heap.allocate(MIB)
    with pytest.raises(
        WorkspaceError,
        match=r"2\.1 MB more do not fit on cuda:0\. Free tensors that are no longer needed\.$",
    ):
        heap.allocate(MIB)
    with releases.put_off():
        del block
    assert len(driver.mapped) == 2
    heap.allocate(MIB)


@pytest.mark.parametrize(("found", "left"), [(None, "0"), ("", "0"), ("0", "0"), ("1", "1")])
def test_nccl_registers_nothing_in_graphs_unless_the_user_wants_it(
    monkeypatch: pytest.MonkeyPatch, found: str | None, left: str
) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", found or "")
    if found is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    memory_cuda._keep_nccl_from_registering()
    assert os.environ["NCCL_GRAPH_REGISTER"] == left
