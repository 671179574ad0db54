"""Call the CUDA driver through the package cuda-bindings, which the CUDA backend alone needs.

Beside calls and their errors, this has what only the driver tells of a GPU's memory, and how to
write there while all queues to the GPU are blocked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from interlace.errors import BackendError


@functools.cache
def driver() -> Any:
    """Return the bindings of the CUDA driver.

    Raises:
        BackendError: The package cuda-bindings is not installed.
    """
    # Not imported above: the CPU backend must run where there is no CUDA.
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendError(
            "the cuda backend must have the package cuda-bindings, which CUDA builds of torch "
            "bring along; it cannot be imported. Run: pip install cuda-bindings"
        ) from error
    return driver


def values_of(result: tuple[Any, ...]) -> Any:
    """Return the values of a driver call.

    Raises:
        BackendError: The call failed.
    """
    # Every call of the bindings returns its error first, and then what the call itself returns.
    code, *values = result
    if int(code) != 0:
        raise BackendError(
            f"a CUDA driver call failed: {code.name}. Run `interlace doctor` to see what is "
            "missing."
        )
    return values[0] if len(values) == 1 else tuple(values)


def require_enqueued(result: tuple[Any, ...], operation: str, *numbers: int) -> None:
    """Check a driver call that enqueues an operation and returns nothing but an error.

    Args:
        operation: What was enqueued, with a ``%d`` for each of ``numbers``.

    Raises:
        BackendError: The driver refuses the operation.
    """
    (error,) = result
    if int(error) != 0:
        raise BackendError(
            f"{operation % numbers} must be accepted by the CUDA driver; got {error.name}."
        )


# The streams of a process share a few queues to the device: 8, or ``CUDA_DEVICE_MAX_CONNECTIONS``;
# 2 under NVIDIA's Multi-Process Service. A stream that waits for a word in memory, or for such a
# stream, keeps its queue. On an H200, once as many streams wait as there are queues, nothing that
# is enqueued on any other stream begins, whatever its priority. A context of its own has other
# queues.

Write = Callable[[int, int], None]
"""Writes a 32-bit number to an address: ``write(address, number)``; it is there on return."""


@contextlib.contextmanager
def writer(device: torch.device) -> Iterator[Write]:
    """Yield a function that writes words to a GPU's memory, in a context that is made for it.

    Making it takes about 0.1 s and some hundred MiB of the GPU's memory. Without that memory, words
    are written by a stream of PyTorch's context, which may be blocked.
    """
    cu = driver()
    try:
        context = _new_context(values_of(cu.cuDeviceGet(device.index)))
    except BackendError:
        with torch.cuda.device(device):
            yield _write_by(torch.cuda.Stream(device).cuda_stream)
        return
    try:
        non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        yield _write_by(values_of(cu.cuStreamCreate(non_blocking)))
    finally:
        cu.cuCtxPopCurrent()
        cu.cuCtxDestroy(context)


def _new_context(device: Any) -> Any:
    """Return a new context, which is this thread's current one."""
    cu = driver()
    try:
        return values_of(cu.cuCtxCreate(None, 0, device))
    except TypeError:  # before CUDA 13 it takes no parameters of its own
        return values_of(cu.cuCtxCreate(0, device))


def _write_by(stream: Any) -> Write:
    cu = driver()

    def write(address: int, number: int) -> None:
        result = cu.cuStreamWriteValue32(stream, address, number, 0)
        require_enqueued(result, "a write of a word")
        values_of(cu.cuStreamSynchronize(stream))

    return write


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
