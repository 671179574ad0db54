"""Group memory of CUDA GPUs in one node, by the driver's virtual memory management.

Each rank creates physical memory on its GPU, the ranks exchange its handles as file descriptors, and each maps all of them
into its own range, one after the other: ``base + rank * stride + offset``. There is one mapping of each piece per
process, and so no aliasing: within one kernel, CUDA orders accesses through two addresses of the same memory only after
``fence.proxy.alias`` (CUDA programming guide, "Virtual aliasing support"). ``docs/decisions/0002`` says why torch's symmetric
memory does not do the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm.descriptors import exchanged_descriptors
from interlace.comm.memory import Block, FreeList, Heap
from interlace.errors import BackendError, WorkspaceError
from interlace.units import format_bytes, next_power_of_2, round_up

if TYPE_CHECKING:
    from interlace.comm.group import Group

_OUT_OF_MEMORY = 2


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
    """GPUs' memory at fixed distances; see the module."""

    def __init__(self, group: Group, device: torch.device) -> None:
        if torch.version.hip:
            raise BackendError("the cuda backend must run on NVIDIA GPUs; got a ROCm build of torch. Use backend='cpu'.")
        self.device = device
        self._group = group
        self._cu = cu = _driver()
        torch.cuda.current_stream(device)  # the driver calls below need torch's context
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index
        self._handle_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties.requestedHandleTypes = self._handle_type
        recommended = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(_call(cu.cuMemGetAllocationGranularity(self._properties, recommended)))
        total = torch.cuda.get_device_properties(device).total_memory
        self.stride = next_power_of_2(total)
        self._base = int(_call(cu.cuMemAddressReserve(self.stride * group.world_size, 0, 0, 0)))
        self._offsets = FreeList(self.stride)

    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        cu = self._cu
        piece = round_up(max(nbytes, 1), self.granularity)
        size = pieces * piece
        own: list[Any] = []
        try:
            for _ in range(pieces):
                result = cu.cuMemCreate(piece, self._properties, 0)
                if int(result[0]) == _OUT_OF_MEMORY:
                    raise WorkspaceError(
                        f"symmetric memory must fit on the GPU; {format_bytes(size)} more do not fit on {self.device}."
                    )
                own.append(_call(result))
            fds = [int(_call(cu.cuMemExportToShareableHandle(handle, self._handle_type, 0))) for handle in own]
            with exchanged_descriptors(self._group, "empty_symmetric", fds) as descriptors:
                offset = self._offsets.take(size)
                for rank, held in enumerate(descriptors):
                    place = self._base + rank * self.stride + offset
                    for i, descriptor in enumerate(held):
                        if rank == self._group.rank:
                            _call(cu.cuMemMap(place + i * piece, piece, 0, own[i], 0))
                        else:
                            physical = _call(cu.cuMemImportFromShareableHandle(descriptor, self._handle_type))
                            _call(cu.cuMemMap(place + i * piece, piece, 0, physical, 0))
                            _call(cu.cuMemRelease(physical))
                    self._allow(place, size)
        finally:
            for handle in own:
                _call(cu.cuMemRelease(handle))  # mappings keep the memory
        mine = self._base + self._group.rank * self.stride + offset
        _call(cu.cuMemsetD8(mine, 0, size))
        torch.cuda.synchronize(self.device)

        def release() -> None:
            # Kernels of this rank may still be writing; peers keep the memory that they map.
            torch.cuda.synchronize(self.device)
            for rank in range(self._group.world_size):
                for i in range(pieces):
                    _call(cu.cuMemUnmap(self._base + rank * self.stride + offset + i * piece, piece))
            self._offsets.give(offset, size)

        return Block(self._base + offset, size, self.stride, release)

    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], None]]:
        cu, size = self._cu, len(addresses) * nbytes
        base = int(_call(cu.cuMemAddressReserve(size, 0, 0, 0)))
        for i, address in enumerate(addresses):
            physical = _call(cu.cuMemRetainAllocationHandle(address))
            _call(cu.cuMemMap(base + i * nbytes, nbytes, 0, physical, 0))
            _call(cu.cuMemRelease(physical))
        self._allow(base, size)

        def release() -> None:
            torch.cuda.synchronize(self.device)
            for i in range(len(addresses)):
                _call(cu.cuMemUnmap(base + i * nbytes, nbytes))
            _call(cu.cuMemAddressFree(base, size))

        return base, release

    def _allow(self, address: int, size: int) -> None:
        access = self._cu.CUmemAccessDesc()
        access.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.index
        access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(self._cu.cuMemSetAccess(address, size, [access], 1))
