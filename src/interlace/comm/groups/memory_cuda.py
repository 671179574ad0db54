"""Share memory between the GPUs of one node by the driver's virtual memory management.

Each rank creates physical memory on its GPU, the ranks exchange its handles as file descriptors,
and each rank maps all of them into its range, at ``base + rank * stride + offset``. There is one
mapping of each piece per process, and so no aliasing: within one kernel,
CUDA orders accesses through two addresses of the same memory only after ``fence.proxy.alias`` (CUDA
programming guide, "Virtual aliasing support"). ``docs/decisions/0002`` says why torch's symmetric
memory does not do the exchange.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.comm.host.channel import HostChannel
from interlace.comm.host.descriptors import exchanged_descriptors
from interlace.comm.replay.memory import Block, Heap, Range, releases
from interlace.comm.runtime.driver import driver, values_of
from interlace.errors import BackendError, InterlaceError, WorkspaceError
from interlace.units import format_bytes, next_power_of_2, round_up

_OUT_OF_MEMORY = 2


def _keep_nccl_from_registering() -> None:
    """Tell NCCL not to register what CUDA graphs send, unless the user wants it to.

    In a graph, NCCL gives peers access to the memory of each send and receive, if it can: to memory
    like this, and not to what torch gets by cudaMalloc. A send then waits for the address of the
    receiving memory, which comes only if that is registered, too ("We require users registering
    buffers on both sides", says src/enqueue.cc of NCCL 2.30). So a graph in which NCCL sends a
    result of ours to memory of torch's would hang. NCCL reads the variable at its first captured
    call.
    """
    if not os.environ.get("NCCL_GRAPH_REGISTER"):  # NCCL takes an empty one for unset
        os.environ["NCCL_GRAPH_REGISTER"] = "0"


class CudaHeap(Heap):
    """Allocate GPU memory of all ranks at fixed distances; see the module."""

    def __init__(self, channel: HostChannel, device: torch.device) -> None:
        """Reserve addresses for all ranks.

        Args:
            channel: Passes descriptors of memory between the ranks.
            device: This rank's GPU.

        Raises:
            BackendError: The driver's bindings are missing, a driver call failed, or torch was
                built for ROCm.
        """
        if torch.version.hip:
            raise BackendError(
                "the cuda backend must run on NVIDIA GPUs; got a ROCm build of torch. Use "
                "backend='cpu'."
            )
        self.device = device
        self._channel = channel
        self._cu = cu = driver()
        _keep_nccl_from_registering()
        torch.cuda.current_stream(device)  # the driver calls below need torch's context
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index
        self._handle_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties.requestedHandleTypes = self._handle_type
        recommended = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(
            values_of(cu.cuMemGetAllocationGranularity(self._properties, recommended))
        )
        total = torch.cuda.get_device_properties(device).total_memory
        self.stride = next_power_of_2(total)
        self._reserve()

    def _reserve(self) -> None:
        """Reserve the address range."""
        cu, size = self._cu, self.stride * self._channel.members.world_size
        self.base = base = int(values_of(cu.cuMemAddressReserve(size, 0, 0, 0)))
        self._range = Range(
            base, self.stride, self.device, functools.partial(_free_range, cu, base, size)
        )

    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        """Allocate zeroed memory on every GPU, piece by piece; see :meth:`Heap.allocate`."""
        # Addresses of ranks of other nodes stay reserved and without memory: an access faults.
        cu, ranks, rank = self._cu, self._channel.members.local_ranks, self._channel.members.rank
        piece = round_up(max(nbytes, 1), self.granularity)
        size = pieces * piece
        with contextlib.ExitStack() as handles, contextlib.ExitStack() as undo:
            offset, local_handles, fds, failure = 0, [], [], None
            # Step 1: make this rank's memory, and descriptors of it.
            try:
                offset = self._range.offsets.take(size)
                undo.callback(self._range.offsets.give, offset, size)
                for _ in range(pieces):
                    handle = self._create(piece, size)
                    local_handles.append(handle)
                    # Mappings keep the memory alive; the handle itself is needed here only.
                    handles.callback(cu.cuMemRelease, handle)
                fds = [
                    int(values_of(cu.cuMemExportToShareableHandle(handle, self._handle_type, 0)))
                    for handle in local_handles
                ]
            except InterlaceError as error:
                # The peers must learn of the failure in the exchange before it is raised.
                failure = error
            # Step 2: get the peers' descriptors. Step 3: map the memory of the node's ranks.
            with exchanged_descriptors(
                self._channel, "empty_symmetric", fds, failure
            ) as descriptors:
                for peer in ranks:
                    base = self._range.base + peer * self.stride + offset
                    for i, descriptor in enumerate(descriptors[peer]):
                        address = base + i * piece
                        with contextlib.ExitStack() as imported:
                            physical = local_handles[i]
                            if peer != rank:
                                physical = values_of(
                                    cu.cuMemImportFromShareableHandle(descriptor, self._handle_type)
                                )
                                imported.callback(cu.cuMemRelease, physical)
                            values_of(cu.cuMemMap(address, piece, 0, physical, 0))
                        undo.callback(cu.cuMemUnmap, address, piece)
                    self._allow(base, size)
            # Step 4: each rank zeroes its memory. It does not tell the peers: an allocation ends
            # with an exchange of outcomes, before which no rank uses the memory.
            values_of(cu.cuMemsetD8(self._range.base + rank * self.stride + offset, 0, size))
            torch.cuda.synchronize(self.device)
            undo.pop_all()
        release = functools.partial(_unmap, cu, self._range, ranks, offset, pieces, piece)
        base, world_size = self._range.base, self._channel.members.world_size
        return Block(base + offset, size, self.stride, world_size, self.device, release)

    def _create(self, piece: int, size: int) -> Any:
        """Return a handle of new memory of this GPU; unused memory makes room for it.

        Args:
            piece: Bytes of the memory.
            size: Bytes of all pieces of the block, for the error message.

        Raises:
            WorkspaceError: The memory does not fit on the GPU.
        """
        result = self._cu.cuMemCreate(piece, self._properties, 0)
        if int(result[0]) == _OUT_OF_MEMORY:
            # Groups that nothing refers to any more may lie in reference cycles, and their memory
            # may wait for its release.
            gc.collect()
            releases.empty()
            # PyTorch refuses that while any thread allocates from a graph's pool.
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
            result = self._cu.cuMemCreate(piece, self._properties, 0)
        if int(result[0]) == _OUT_OF_MEMORY:
            raise WorkspaceError(
                f"symmetric memory must fit on the GPU; {format_bytes(size)} more do not fit on "
                f"{self.device}. "
                f"Free tensors that are no longer needed."
            )
        return values_of(result)

    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], object]]:
        """Map physical memory once more, contiguously; see :meth:`Heap.remap`."""
        cu, size = self._cu, len(addresses) * nbytes
        with contextlib.ExitStack() as undo:
            base = int(values_of(cu.cuMemAddressReserve(size, 0, 0, 0)))
            undo.callback(cu.cuMemAddressFree, base, size)
            for i, address in enumerate(addresses):
                with contextlib.ExitStack() as retained:
                    physical = values_of(cu.cuMemRetainAllocationHandle(address))
                    retained.callback(cu.cuMemRelease, physical)
                    values_of(cu.cuMemMap(base + i * nbytes, nbytes, 0, physical, 0))
                undo.callback(cu.cuMemUnmap, base + i * nbytes, nbytes)
            self._allow(base, size)
            undo.pop_all()
        return base, functools.partial(_unmap_again, cu, base, len(addresses), nbytes)

    def _allow(self, address: int, size: int) -> None:
        """Let this GPU read and write mapped memory."""
        access = self._cu.CUmemAccessDesc()
        access.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.index
        access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        values_of(self._cu.cuMemSetAccess(address, size, [access], 1))


def _unmap(
    cu: Any, reserved: Range, ranks: Sequence[int], offset: int, pieces: int, piece: int
) -> None:
    """Unmap a block and free its offset. Peers keep their mappings of this rank's memory."""
    for rank in ranks:
        for i in range(pieces):
            values_of(
                cu.cuMemUnmap(reserved.base + rank * reserved.stride + offset + i * piece, piece)
            )
    reserved.offsets.give(offset, pieces * piece)


def _unmap_again(cu: Any, base: int, pieces: int, piece: int) -> None:
    """Unmap pieces that :meth:`CudaHeap.remap` has mapped, and free their address range."""
    for i in range(pieces):
        values_of(cu.cuMemUnmap(base + i * piece, piece))
    _free_range(cu, base, pieces * piece)


def _free_range(cu: Any, base: int, size: int) -> None:
    """Unreserve an address range."""
    values_of(cu.cuMemAddressFree(base, size))
