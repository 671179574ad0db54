"""Group memory of CUDA GPUs in one node: torch symmetric memory, its peers mapped again, one after the other.

Torch allocates, exchanges the handles and maps every peer's allocation somewhere. Each allocation's handle is then
retained and mapped a second time at ``base + rank * stride + offset`` (CUDA driver API, virtual memory management).
Torch's own addresses are not used after that: within one kernel, CUDA orders accesses through two mappings of the
same memory only after ``fence.proxy.alias`` (CUDA programming guide, "Virtual aliasing support").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from interlace.comm.memory import Block, FreeList, Heap
from interlace.errors import BackendError
from interlace.units import next_power_of_2, round_up

if TYPE_CHECKING:
    from interlace.comm.group import Group


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendError(
            "the cuda backend must have the package cuda-bindings, which CUDA builds of torch bring along; "
            "it cannot be imported. Run: pip install cuda-bindings"
        ) from error
    return driver


def _call(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise BackendError(f"a CUDA driver call failed: {code.name}. Run `interlace doctor` to see what is missing.")
    return values[0] if len(values) == 1 else tuple(values)


class CudaHeap(Heap):
    """Peers' allocations at fixed distances; see the module."""

    def __init__(self, group: Group, device: torch.device) -> None:
        if torch.version.hip:
            raise BackendError("the cuda backend must run on NVIDIA GPUs; got a ROCm build of torch. Use backend='cpu'.")
        self.device = device
        self._group = group
        self._cu = _driver()
        total = torch.cuda.get_device_properties(device).total_memory
        self.stride = next_power_of_2(total)
        self._base = int(_call(self._cu.cuMemAddressReserve(self.stride * group.world_size, 0, 0, 0)))
        self._offsets = FreeList(self.stride)

    def allocate(self, nbytes: int) -> Block:
        from torch.distributed import _symmetric_memory as symmetric_memory

        usable = round_up(max(nbytes, 1), 256)  # what follows, up to the allocation's end, is torch's own signal pad
        allocation = symmetric_memory.empty(usable, dtype=torch.uint8, device=self.device)
        handle = symmetric_memory.rendezvous(allocation, self._group.name)
        allocation.zero_()
        torch.cuda.synchronize(self.device)
        pointers = list(handle.buffer_ptrs)
        sizes = {int(_call(self._cu.cuMemGetAddressRange(pointer))[1]) for pointer in pointers}
        if len(sizes) != 1:
            raise BackendError(f"torch symmetric memory must allocate equal sizes on every rank; got {sorted(sizes)}.")
        size = sizes.pop()
        offset = self._offsets.take(size)
        for rank, pointer in enumerate(pointers):
            physical = _call(self._cu.cuMemRetainAllocationHandle(pointer))
            _call(self._cu.cuMemMap(self._base + rank * self.stride + offset, size, 0, physical, 0))
            _call(self._cu.cuMemRelease(physical))
            self._allow(self._base + rank * self.stride + offset, size)
        self._group.exchange("empty_symmetric", "mapped")  # zeroed and mapped everywhere before anyone writes
        keep = [allocation, handle]

        def release() -> None:
            # Kernels of this rank may still be writing; peers keep the physical memory alive by their own mappings.
            torch.cuda.synchronize(self.device)
            for rank in range(len(pointers)):
                _call(self._cu.cuMemUnmap(self._base + rank * self.stride + offset, size))
            self._offsets.give(offset, size)
            keep.clear()

        return Block(self._base + offset, usable, self.stride, release)

    def _allow(self, address: int, size: int) -> None:
        access = self._cu.CUmemAccessDesc()
        access.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.index
        access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(self._cu.cuMemSetAccess(address, size, [access], 1))
