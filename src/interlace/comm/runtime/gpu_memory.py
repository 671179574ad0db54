"""Ask how much memory of a GPU is left, and which allocation an address is of."""

from __future__ import annotations

import torch

from interlace.comm.runtime.driver import driver, values_of

_MIB = 1 << 20
_FOR_LIBRARIES = 256 * _MIB
"""What the driver and libraries take beside torch: code of kernels, NCCL's buffers, graphs."""


def has_memory(nbytes: int, device: torch.device) -> bool:
    """Return whether tensors, symmetric memory and CUDA graphs of so many bytes in all can be had,
    whoever takes them first. It is True on the CPU backend.

    Memory that torch keeps for later tensors goes back to the driver if the driver has too little.
    """
    if device.type == "cpu":
        return True
    nbytes += _FOR_LIBRARIES
    try:
        # Torch gives up what it keeps, before it says that there is not enough.
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if is_out_of_memory(error):
            return False
        raise
    if torch.cuda.mem_get_info(device)[0] < nbytes:
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] >= nbytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a GPU's memory is full.

    Torch has a class for it where its allocator fails, and only a text where the driver does, as
    when a CUDA graph is made.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)


def allocation_of(address: int) -> int:
    """Return the driver's number of the allocation at an address of a GPU's memory.

    The driver gives no number a second time within a process, though it gives addresses again.

    Raises:
        BackendError: The driver knows of no allocation at the address.
    """
    cu = driver()
    attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    return int(values_of(cu.cuPointerGetAttribute(attribute, address)))
